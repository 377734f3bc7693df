"""A JAX profiler trace of a few steps."""

from pathlib import Path
from typing import Self

import jax


class StepProfiler:
    """Traces `count` steps from step `first` on into a folder that TensorBoard and xprof read; none for count 0."""

    def __init__(self, folder: Path, *, first: int, count: int):
        self._folder, self._first, self._end = folder, first, first + count
        self._tracing = False

    def before(self, step: int) -> None:
        """Called before a step is dispatched."""
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
