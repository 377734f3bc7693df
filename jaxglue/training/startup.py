"""What the time before the first step went into."""

import time
from typing import Self

import psutil


class StartupTimer:
    """Seconds of each stage since the one before."""

    def __init__(self, begun: float | None = None):
        """Begins the first stage now, or at `begun`, in seconds since the epoch."""
        self._mark = time.time() if begun is None else begun
        self.stages: dict[str, float] = {}
        """Seconds by stage, in order."""

    @classmethod
    def since_process_start(cls) -> Self:
        """A timer whose first stage, the imports, ends now."""
        timer = cls(psutil.Process().create_time())
        timer.stage("imports")
        return timer

    def stage(self, name: str) -> None:
        """Ends a stage."""
        now = time.time()
        self.stages[name], self._mark = now - self._mark, now

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
        return f"{sum(self.stages.values()):.1f} s ({stages})"
