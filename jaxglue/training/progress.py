"""Progress of a run: the start-up by stage, the compilation, then lines above a bar on a terminal."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxglue.engine.program_cache import COMPILED
from jaxglue.terminal.console import Console

SHOWN = {
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "kl": "KL",
    "accuracy": "accuracy",
    "margin": "margin",
    "mean_reward": "reward",
}
"""Metrics of an objective on a line, and their names there."""
_BAR = 20
"""Width of the bar, in characters."""
WAITING, SAMPLING = "waiting for data", "sampling and rewards"
"""What takes time between batches: reading them, or making them of answers."""
_NOTABLE_WAIT = 0.01
"""Share of time spent waiting for data above which it is shown."""
_SECONDS_BETWEEN_LINES = 10


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The logged values of a step, under their names in `metrics.jsonl`."""

    loss: float
    """Nats per target token."""
    epoch: float
    """Passes over the data so far."""
    learning_rate: float
    grad_norm: float | None
    """None when parameters are updated in the backward pass."""
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization, 0–1; None on a device of unknown peak."""
    memory_gb: float
    data_wait: float
    """Share of time spent waiting for a batch, 0–1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the objective, by TRL's names."""


class TrainingProgress:
    """Shows the steps of a run while its context lasts; it never waits for a device."""

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        waits_for: str = WAITING,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the display.

        Args:
            total_steps: optimizer steps of the whole run.
            first_step: steps done before a resume.
            waits_for: what takes time between batches, as lines name it.
            console: by default standard output.
            clock: seconds, for the time left.
        """
        self.console = console or Console()
        self._total, self._waits_for = total_steps, waits_for
        self._clock = clock
        self._begun: tuple[int, float] | None = None
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=_BAR),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._room = self.console.width - _BAR - len(f"step {total_steps}/{total_steps}   ")
        self._task = self._bar.add_task("compiling …", total=total_steps, completed=first_step)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar to `step` steps done."""
        self._bar.update(self._task, completed=step)

    def describe(self, text: str) -> None:
        """Show a text beside the bar."""
        self._bar.update(self._task, description=text[: max(self._room, 1)])

    def report(self, step: int, report: StepReport) -> None:
        """Show the values of a step, perhaps an earlier one than the bar's."""
        line = format_report(report, self._seconds_left(step), self._waits_for)
        self.describe(_first_parts(line, self._room))
        self.say(f"step {step}/{self._total}  {line}")

    def say(self, line: str) -> None:
        """Print a line, above the bar on a terminal."""
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def _seconds_left(self, step: int) -> float | None:
        """Extrapolate the pace since the first report, which excludes compilation; None at the first."""
        now = self._clock()
        if self._begun is None or step <= self._begun[0]:
            self._begun = self._begun or (step, now)
            return None
        first, begun = self._begun
        return (now - begun) / (step - first) * (self._total - step)


def format_report(report: StepReport, seconds_left: float | None, waits_for: str = WAITING) -> str:
    """Format a step's values on one line, the most important first, two spaces apart."""
    parts = [
        f"loss {report.loss:.4f}",
        *(f"{name} {report.metrics[key]:.3g}" for key, name in SHOWN.items() if key in report.metrics),
        f"{format_duration(seconds_left)} left" if seconds_left is not None else "",
        f"{report.tokens_per_second:,.0f} tokens/s",
        f"epoch {report.epoch:.2f}",
        f"grad norm {report.grad_norm:.3g}" if report.grad_norm is not None else "",
        f"MFU {report.mfu:.1%}" if report.mfu is not None else "",
        f"{report.memory_gb:.1f} GB",
        f"{waits_for} {report.data_wait:.0%}" if report.data_wait > _NOTABLE_WAIT else "",
        f"lr {report.learning_rate:.2e}",
    ]
    return "  ".join(filter(None, parts))


def _first_parts(line: str, width: int) -> str:
    """Return the first parts of a line of `format_report` that fit, for the bar, which would cut off the step."""
    parts = line.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Format hours, minutes and seconds: `1:02:03` or `2:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Compiling:
    """Context that shows each compiled program until the first step is done.

    Args:
        progress: of the run; a bar on a terminal, else a line now and then.
        predicted: seconds of compiling everything; 0 if unknown.
        is_over: tells whether the first step is done.
        clock: seconds.
    """

    def __init__(
        self,
        progress: TrainingProgress,
        predicted: float,
        is_over: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._progress, self._predicted, self._is_over, self._clock = progress, predicted, is_over, clock
        self._programs, self._begun = 0, clock()
        self._printed = self._begun

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._count)

    def _count(self, event: str, duration_secs: float, **_: Any) -> None:
        if event != COMPILED or self._is_over():
            return
        self._programs += 1
        now = self._clock()
        line = self._line(now - self._begun)
        self._progress.describe(line)
        if not self._progress.console.is_terminal and now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            self._progress.say(line)

    def _line(self, seconds: float) -> str:
        line = f"compiling: {self._programs} programs in {format_duration(seconds)}"
        left = self._predicted - seconds
        return f"{line}, at most {format_duration(left)} left" if left > 0 else line


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
