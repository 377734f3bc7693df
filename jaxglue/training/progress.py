"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_NOTABLE_WAIT = 0.01
"""Share of the time spent waiting for data from which on it is shown."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What is logged of a step; its fields are the names in `metrics.jsonl`."""

    loss: float
    """Nats per target token."""
    learning_rate: float
    grad_norm: float | None
    """None when layers are updated before all gradients are there."""
    tokens_per_second: float
    mfu: float | None
    """0–1; None on a device with an unknown peak."""
    memory_gb: float
    data_wait: float
    """Share of the time spent waiting for a batch, 0–1."""


class TrainingProgress:
    """Shows the steps of a run while its context lasts. It only formats numbers that are on the host already."""

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepares the display.

        Args:
            total_steps: optimizer steps at the end of the run.
            first_step: steps done before, for a resumed run.
            console: where to print; by default standard output.
            clock: seconds, for the time left.
        """
        self.console = console or Console()
        self._total = total_steps
        self._clock = clock
        self._begun: tuple[int, float] | None = None
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("compiling …", total=total_steps, completed=first_step)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Moves the bar; `step` steps are done."""
        self._bar.update(self._task, completed=step)

    def report(self, step: int, report: StepReport) -> None:
        """Shows the values of a step, which may be an earlier one than the bar's."""
        line = format_report(report, self._seconds_left(step))
        self._bar.update(self._task, description=line)
        if not self.console.is_terminal:
            self.say(f"step {step}/{self._total}  {line}")

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _seconds_left(self, step: int) -> float | None:
        """From the pace since the first report, which keeps compilation out; None at the first."""
        now = self._clock()
        if self._begun is None or step <= self._begun[0]:
            self._begun = self._begun or (step, now)
            return None
        first, begun = self._begun
        return (now - begun) / (step - first) * (self._total - step)


def format_report(report: StepReport, seconds_left: float | None) -> str:
    """The values of a step on one line, those first that a narrow terminal must not cut off."""
    parts = [
        f"loss {report.loss:.4f}",
        f"{format_duration(seconds_left)} left" if seconds_left is not None else "",
        f"{report.tokens_per_second:,.0f} tokens/s",
        f"MFU {report.mfu:.1%}" if report.mfu is not None else "",
        f"{report.memory_gb:.1f} GB",
        f"waiting for data {report.data_wait:.0%}" if report.data_wait > _NOTABLE_WAIT else "",
        f"lr {report.learning_rate:.2e}",
    ]
    return "  ".join(filter(None, parts))


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: `1:02:03` or `2:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
