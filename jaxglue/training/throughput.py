"""How fast a run is and how much memory it takes."""

import contextlib
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import psutil

_PEAK_TFLOPS = {
    "B200": 2250,
    "GB200": 2500,
    "B100": 1750,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A30": 165,
    "A40": 149.7,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX PRO 6000": 503.8,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71,
}
"""Dense bf16 with float32 accumulation, TFLOP/s, from NVIDIA's data sheets and architecture white papers. The first
entry wins all of whose words are in the device's name."""
_OTHER_CHIPS = {"Laptop", "D", "Max", "MIG", "SUPER"}
"""Words in a device's name that make it slower (or faster) than the entry."""


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 peak of a GPU, FLOP/s, from `jax.Device.device_kind`; None for one that is not in the table."""
    words = set(re.split(r"[\s-]+", device_kind))
    if words & _OTHER_CHIPS:
        return None
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS.items() if words.issuperset(name.split())), None)


class Reading(NamedTuple):
    """Speed over a stretch of training."""

    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B), 0–1: recomputation counts as no useful work."""
    data_wait: float
    """Share of the time, 0–1, that the loop waited for a batch."""


class Meter:
    """Tokens and seconds since the last reading and since the start; evaluation and other pauses do not count."""

    def __init__(
        self,
        *,
        model_flops_per_token: float,
        devices: Sequence[jax.Device],
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Starts to count.

        Args:
            model_flops_per_token: of forward and backward, without recomputation.
            devices: those that train, all of one kind.
            clock: seconds.
        """
        peak = peak_flops(devices[0].device_kind)
        self._tokens_per_second_at_peak = peak and peak * len(devices) / model_flops_per_token
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forgets everything counted, as after the first step, whose time is compilation."""
        self._window = self._total = _Count()
        self._mark = self._clock()

    def add(self, tokens: int) -> None:
        """Counts the tokens of a step, padding left out."""
        self._window = self._window.plus(tokens=tokens)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside counts as waiting for data."""
        begun = self._clock()
        yield
        self._window = self._window.plus(waited=self._clock() - begun)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        begun = self._clock()
        yield
        self._mark += self._clock() - begun

    def read(self) -> Reading:
        """Speed since the last reading."""
        now = self._clock()
        window = self._window.plus(seconds=now - self._mark)
        self._total = self._total.plus(*window)
        self._window, self._mark = _Count(), now
        return self._reading(window)

    def total(self) -> Reading:
        """Speed from the start to the last reading."""
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
    """Bytes in use, of the fullest device."""

    used: int
    peak: int
    place: str
    """What was measured: "device", or "host" where devices do not count their memory, as on CPUs."""


def memory_use(devices: Sequence[Any]) -> Memory:
    """Memory in use now and at most so far: XLA's count for GPUs, the process's resident memory for CPUs."""
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        used, peak = (max(stat[key] for stat in stats) for key in ("bytes_in_use", "peak_bytes_in_use"))
        return Memory(used, peak, "device")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(psutil.Process().memory_info().rss, peak, "host")
