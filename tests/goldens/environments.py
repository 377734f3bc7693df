"""Environments with state in TRL's shape, for goldens of its trainer and for tests: without this library."""

import random


class Tally:
    """Counts up and down; rewards a count near to the row's goal."""

    def reset(self, goal=0, **row):
        self.count, self.goal = 0, goal
        return None if goal < 0 else f" The goal is {goal}."

    def add(self, number: int) -> int:
        """Add a number to the count.

        Args:
            number: the number to add.
        """
        self.count += number
        return self.count

    def divide(self, number: int) -> float:
        """Divide the count by a number.

        Args:
            number: the divisor.
        """
        self.count = self.count / number
        return self.count

    def get_reward(self) -> float:
        return -abs(self.count - self.goal) / 10


class Parrot:
    """Says again what it is told, and has no reward of its own."""

    def reset(self, **row):
        self.heard = []

    async def say(self, text: str) -> str:
        """Say a text again.

        Args:
            text: what to say.
        """
        self.heard.append(text)
        return " ".join(self.heard)


class Slide:
    """A row of tiles that are moved to one side, where equal ones merge; another one comes at random."""

    def reset(self, seed=0, **row):
        self._random, self.tiles, self.score = random.Random(seed), [2, 0, 2, 4, 0, 4], 0
        return f" {self.tiles}"

    def _merge(self, tiles):
        tiles, merged = [tile for tile in tiles if tile], []
        while tiles:
            if tiles[:2] == [tiles[0]] * 2:
                merged.append(2 * tiles[0])
                self.score += merged[-1]
                tiles = tiles[2:]
            else:
                merged.append(tiles.pop(0))
        return merged + [0] * (6 - len(merged))

    def move(self, direction: str) -> str:
        """Move all tiles.

        Args:
            direction: left or right.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"no direction {direction}")
        step = 1 if direction == "left" else -1
        self.tiles = self._merge(self.tiles[::step])[::step]
        empty = [place for place, tile in enumerate(self.tiles) if not tile]
        if not empty:
            raise ValueError("the game is over")
        self.tiles[self._random.choice(empty)] = 2
        return f"{self.tiles}, score {self.score}"

    def get_reward(self):
        return float(self.score)


BOTH = {"tally": Tally, "parrot": Parrot}


def heard(environments, **columns):
    """Reward what parrots have heard, as functions beside environments do in TRL."""
    return [float(len(environment.heard)) if hasattr(environment, "heard") else None for environment in environments]
