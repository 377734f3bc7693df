"""What the time before the first step went into."""

import time
from collections.abc import Callable


class StartupTimer:
    """Seconds of each stage since the one before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._mark = clock()
        self.stages: dict[str, float] = {}
        """Seconds by stage, in order."""

    def stage(self, name: str) -> None:
        """Ends a stage."""
        now = self._clock()
        self.stages[name], self._mark = now - self._mark, now

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
        return f"{sum(self.stages.values()):.1f} s ({stages})"
