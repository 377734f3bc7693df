"""Time of the start-up, by stage."""

import os
import time
from pathlib import Path
from typing import Self


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
        timer = cls(time.time() - _process_age())
        timer.stage("imports")
        return timer

    def stage(self, name: str) -> None:
        """End a stage, which began with the end of the previous one."""
        now = time.time()
        self.stages[name], self._mark = now - self._mark, now

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
        return f"{sum(self.stages.values()):.1f} s ({stages})"


def _process_age() -> float:
    """Return the seconds since this process began; psutil's time of creation is off by up to one."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
