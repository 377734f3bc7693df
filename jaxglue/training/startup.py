"""Time of the start-up, by stage."""

import time
from typing import Self

import psutil


class StartupTimer:
    """Measures the stages of a start-up."""

    def __init__(self, begun: float | None = None):
        """Begin the first stage now, or at `begun`, in seconds since the epoch."""
        self._mark = time.time() if begun is None else begun
        self.stages: dict[str, float] = {}
        """Seconds by stage, in order."""

    @classmethod
    def since_process_start(cls) -> Self:
        """Return a timer whose first stage, the imports, ends now."""
        timer = cls(psutil.Process().create_time())
        timer.stage("imports")
        return timer

    def stage(self, name: str) -> None:
        """End a stage, which began with the end of the previous one."""
        now = time.time()
        self.stages[name], self._mark = now - self._mark, now

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
        return f"{sum(self.stages.values()):.1f} s ({stages})"
