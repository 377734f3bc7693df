"""A calculator with two numbers on its display: its keys are tools."""


class Calculator:
    """Computes a result of two numbers; the row's word tells which one is asked for."""

    def __init__(self):
        self.turn_reward = None  # of a turn, which is told beside its result

    def reset(self, a: int, b: int, answer: str, **row) -> None:
        """Put two numbers on the display."""
        self.numbers, self.answer = (a, b), answer

    def add(self) -> str:
        """Add the numbers."""
        return self._show(self.numbers[0] + self.numbers[1])

    def subtract(self) -> str:
        """Subtract the second number from the first."""
        return self._show(self.numbers[0] - self.numbers[1])

    def multiply(self) -> str:
        """Multiply the numbers."""
        return self._show(self.numbers[0] * self.numbers[1])

    def _show(self, result: int) -> str:
        self.turn_reward = 0.5 * (str(result) == self.answer)
        return str(result)
