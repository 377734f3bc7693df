"""Speed and memory of a run."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import psutil

from jaxglue.planner.gpus import peak_flops


class Reading(NamedTuple):
    """Speed over a window of training."""

    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization (Chowdhery et al. 2022, appendix B), 0–1; None if unknown: excludes recomputation."""
    data_wait: float
    """Share of time spent waiting for a batch, 0–1."""


class Meter:
    """Counts tokens and seconds since the last reading and since the start, without pauses such as evaluation."""

    def __init__(
        self,
        *,
        model_flops_per_token: float,
        devices: Sequence[jax.Device],
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start counting.

        Args:
            model_flops_per_token: forward and backward, without recomputation.
            devices: all that train, of one kind.
            clock: seconds.
        """
        peak = peak_flops(devices[0].device_kind)
        self._tokens_per_second_at_peak = peak and peak * len(devices) / model_flops_per_token
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget everything counted."""
        self._window = self._total = _Count()
        self._mark = self._last = self._clock()

    def add(self, tokens: int, done: float) -> None:
        """Count the tokens of a step, without padding, and the time when it was done."""
        self._window, self._last = self._window.plus(tokens=tokens), done

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count time inside the context as waiting for data."""
        begun = self._clock()
        yield
        self._window = self._window.plus(waited=self._clock() - begun)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude time inside the context."""
        begun = self._clock()
        yield
        pause = self._clock() - begun
        self._mark, self._last = self._mark + pause, self._last + pause

    def read(self) -> Reading:
        """Return the speed since the last reading, up to the end of the last step counted."""
        window = self._window.plus(seconds=self._last - self._mark)
        self._total = self._total.plus(*window)
        self._window, self._mark = _Count(), self._last
        return self._reading(window)

    def total(self) -> Reading:
        """Return the speed from the start to the last reading."""
        return self._reading(self._total)

    def _reading(self, count: "_Count") -> Reading:
        seconds = max(count.seconds, 1e-9)
        rate = count.tokens / seconds
        peak = self._tokens_per_second_at_peak
        return Reading(rate, rate / peak if peak else None, min(count.waited / seconds, 1.0))


class _Count(NamedTuple):
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def plus(self, tokens: int = 0, seconds: float = 0.0, waited: float = 0.0) -> "_Count":
        return _Count(self.tokens + tokens, self.seconds + seconds, self.waited + waited)


class Memory(NamedTuple):
    """Memory of the fullest device, in bytes."""

    used: int
    peak: int
    kind: str
    """"device", or "host" for devices that do not count their memory, as CPUs."""


def memory_use(devices: Sequence[Any]) -> Memory:
    """Return memory in use now and at its peak: XLA's count on GPUs, the process's resident memory on CPUs."""
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        used, peak = (max(stat[key] for stat in stats) for key in ("bytes_in_use", "peak_bytes_in_use"))
        return Memory(used, peak, "device")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(psutil.Process().memory_info().rss, peak, "host")
