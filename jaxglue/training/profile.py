"""A JAX profiler trace of a few steps."""

from pathlib import Path
from typing import Self

import jax


class StepProfiler:
    """Traces `count` steps from step `first` on, into a folder for TensorBoard and xprof."""

    def __init__(self, folder: Path, *, first: int, count: int):
        self._folder, self._first, self._end = folder, first, first + count
        self._tracing = False

    def before(self, step: int) -> None:
        """Start or stop the trace; call it before dispatching each step."""
        if step == self._first and self._end > self._first:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        if step == self._end:
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
