"""Progress of preparing, loading and writing: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jaxglue.terminal.console import Console
from jaxglue.terminal.lines import visible

Advance = Callable[[float], None]
"""Callback with the bytes done so far in a stage."""
_SECONDS_BETWEEN_LINES = 10
_BAR, _RATES = 12, 40
"""Width of the bar, and of what follows it."""


def ignore(done: float) -> None:
    """Advance nothing."""


class DataProgress:
    """Shows each stage with its rate and the time left."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        """Prepare the display.

        Args:
            console: by default standard error.
            clock: seconds.
        """
        self._console, self._clock = console or Console(stderr=True), clock

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Advance]:
        """Show a stage while its context lasts.

        Args:
            name: "tokenizing chats.jsonl".
            total: bytes; None if unknown.
        """
        if not self._console.is_terminal:
            yield self._lines(name, total)
            return
        rates = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) if total else ()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=_BAR), *rates)
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(_short(visible(name), self._console.width - _RATES - _BAR), total=total)
            yield lambda done: bar.update(task, completed=done)

    def _lines(self, name: str, total: float | None) -> Advance:
        begun = printed = self._clock()

        def advance(done: float) -> None:
            nonlocal printed
            now = self._clock()
            if now - printed >= _SECONDS_BETWEEN_LINES:
                printed = now
                line = _line(name, done, total, now - begun)
                self._console.print(line, soft_wrap=True)

        return advance


class NoProgress(DataProgress):
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Advance]:
        """Ignore the stage."""
        yield ignore


def metered[T](items: Iterable[T], sizes: Iterable[float], advance: Advance) -> Iterator[T]:
    """Yield items of these sizes, and count each once the next is asked for."""
    for item, done in zip(items, accumulate(sizes), strict=True):
        yield item
        advance(done)


def _short(name: str, width: int) -> str:
    """Return a stage's name with only the end of its path, if it is too long for a bar's line."""
    verb, _, path = name.partition(" ")
    return name if len(name) <= width else f"{verb} …{path[len(verb) + 2 - width :]}"


def _line(name: str, done: float, total: float | None, seconds: float) -> str:
    rate = done / seconds
    parts = [f"{done / 1e6:,.1f}" + (f" of {total / 1e6:,.1f} MB" if total else " MB"), f"{rate / 1e6:.2f} MB/s"]
    if total and rate:
        parts.append(f"{timedelta(seconds=round(max(0, total - done) / rate))} left")
    return f"{name}: {', '.join(parts)}"
