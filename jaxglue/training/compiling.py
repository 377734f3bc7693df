"""Progress of the compilation before the first step: programs, time, and the time that is predicted to be left."""

import time
from collections.abc import Callable
from typing import Any, Self

import jax

from jaxglue.engine.program_cache import COMPILED
from jaxglue.training.progress import TrainingProgress, format_duration

_SECONDS_BETWEEN_LINES = 10


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
