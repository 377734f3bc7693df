"""Generations that are written while earlier ones are trained on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context

from jaxglue.rl.record import Generation

Write = Callable[[int, int], Generation]
"""Returns the generation after so many optimizer steps, whose first prompt has this position in the run's order."""


class GenerationsAhead:
    """Generations under way, one after the other in a thread, by the optimizer steps before each."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "generations")
        self._under_way = dict[int, Future[Generation]]()

    def __contains__(self, step: int) -> bool:
        return step in self._under_way

    def begin(self, step: int, position: int, write: Write) -> None:
        """Begin the next generation; its first prompt is the one at `position`, or behind that of the one before."""
        before = next(reversed(self._under_way.values()), None)

        def run() -> Generation:
            return write(step, position if before is None else before.result().following)

        self._under_way[step] = self._thread.submit(copy_context().run, run)

    def take(self, step: int) -> Generation:
        """Wait for a generation, and return it."""
        return self._under_way.pop(step).result()

    def wait(self) -> None:
        """Wait for all, and raise an error of one."""
        for future in self._under_way.values():
            future.result()

    def drop(self) -> None:
        """Forget all; those that have not begun never do."""
        for future in self._under_way.values():
            future.cancel()
        wait(self._under_way.values())
        self._under_way.clear()
