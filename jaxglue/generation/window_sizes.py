"""For how many sequences windows are compiled: for all slots, and for fewer by threads, beside the answers."""

import logging
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from itertools import pairwise
from statistics import median_low
from time import monotonic
from typing import Any

_log = logging.getLogger(__name__)
_SMALLEST_SIZE, _STEP = 8, 64
"""Sequences below which a window takes hardly less time, and from which it takes less for each such number left out."""
_PARTS = 8
"""A part of the slots of which multiples are compiled where it is above `_STEP`, and below which nothing is."""
_KNOWN_FOR, _LATEST = 60.0, 7
"""Seconds for which the time of a size is known, and windows of which it is the median."""
_SLOWER, _GAIN = 1.25, 0.1
"""Time of a window, relative to the smallest one's, that is as good; and the part of tokens a second that a larger one
would give in no more time than a smaller one, from which it gives more."""


class WindowTimes:
    """Seconds of windows by size, medians of the latest: of each kind, and of any other where these are not known."""

    def __init__(self) -> None:
        self._times = dict[tuple[Hashable, int], tuple[deque[float], float]]()
        """Seconds of the latest windows, and when the last one was noted."""

    def note(self, kind: Hashable, size: int, seconds: float) -> None:
        """Note what a window took."""
        latest = deque[float](maxlen=_LATEST) if self.own(kind, size) is None else self._times[kind, size][0]
        latest.append(seconds)
        self._times[kind, size] = latest, monotonic()

    def own(self, kind: Hashable, size: int) -> float | None:
        """Return what windows of this kind take; None where that is not known, or was long ago."""
        latest, when = self._times.get((kind, size), ((), 0.0))
        return median_low(latest) if latest and monotonic() - when < _KNOWN_FOR else None

    def of(self, kind: Hashable, size: int) -> float | None:
        """Return what windows of this size take, of this kind where that is known."""
        kinds = [kind, *(other for other, noted in list(self._times) if noted == size)]
        return next((found for each in kinds if (found := self.own(each, size)) is not None), None)


class WindowSizes:
    """Numbers of sequences for which windows of one kind are compiled: the slots, and fewer.

    The last of many answers are decoded by smaller programs, which threads compile meanwhile.

    Args:
        slots: of the cache.
        least: sequences of a window, some of which may be nobody's.
        grows: programs are for as many as there were at a time so far, in place of all slots.
        times: of windows of other kinds, too.
    """

    def __init__(self, slots: int, least: int = 1, *, grows: bool = False, times: WindowTimes | None = None):
        self.times = WindowTimes() if times is None else times
        """Of windows of this kind, and of others."""
        self._slots, self._least, self._ready = max(slots, least), least, dict[int, Any]()
        self._most = 0 if grows else self._slots
        """Sequences of the largest program."""
        self._asked, self._under_way = False, list[Future]()
        self._begun = set[int]()
        """Sizes of which a window was timed, whose first one may take longer."""

    def note(self, size: int, seconds: float) -> None:
        """Note what a window of this size took."""
        if size not in self._begun:
            self._begun.add(size)
            return
        self.times.note(self, size, seconds)

    def seconds(self, count: int) -> float | None:
        """Return what a window of so many answers takes; None where that is not known."""
        sizes = self._for(count)
        return self.times.own(self, sizes[0]) if sizes else None

    def widest(self, count: int) -> int:
        """Return the largest size to which windows are filled up.

        It takes about as long as the smallest one, or gives `count` answers, which all want to decode, more tokens a
        second than the next smaller one. The smallest size of which the time is not known is filled, so that it becomes
        known, and none beyond.
        """
        sizes = self._for(1)
        for smaller, larger in pairwise(sizes):
            least, before, time = (self.times.of(self, size) for size in (sizes[0], smaller, larger))
            if least is None or before is None:
                return smaller
            if time is None:
                return larger
            more = min(count, larger) / min(count, smaller)
            if time > _SLOWER * least and more * before / time < 1 + _GAIN * (larger / smaller - 1):
                return smaller
        return self._slots

    def _for(self, count: int) -> list[int]:
        """Return the sizes for so many answers, the smallest first: those that are compiled, and the slots."""
        return [size for size in sorted({*self._ready, self._most}) if size >= count]

    def take(self, count: int, whole: bool) -> tuple[int, Any]:
        """Return the smallest size for `count` answers that is compiled, and its program.

        Without any, return None as the program, and the largest size if those of a window are `whole`; windows by
        layers, which compile fast, are for a fourth of the slots, of that, …
        """
        if ready := [size for size in list(self._ready) if size >= count]:
            return min(ready), self._ready[min(ready)]
        if count > self._most:
            self._most = min(size for size in (*_fewer(self._slots), self._slots) if size >= count)
            self._asked = False
        size = self._most if whole else self._slots
        while not whole and size // 4 >= max(count, self._least):
            size //= 4
        return size, None

    def put(self, run: Any) -> None:
        """Add the largest program."""
        self._ready.setdefault(self._most, run)

    def compile(self, compiler: ThreadPoolExecutor, compile_size: Callable[[int], Any], count: int = 1) -> None:
        """Let threads compile the sizes that are missing, once: first the smallest ones for `count` answers."""
        if self._asked:
            return
        sizes = [self._most]
        if self._most in self._ready:
            sizes = [size for size in _fewer(self._slots) if size < self._most and size not in self._ready]
        sizes.sort(key=lambda size: (size < count, abs(size - count)))
        self._under_way = [compiler.submit(copy_context().run, self._compile, compile_size, size) for size in sizes]
        self._asked = True

    def first_under_way(self) -> Future | None:
        """Return the compilation of the largest program, or the first of smaller ones; None if it is over."""
        return next((future for future in self._under_way[:1] if not future.done()), None)

    def wait(self) -> None:
        """Wait for the threads."""
        wait(self._under_way)

    def give_up(self) -> None:
        """Leave out the sizes whose compilation has not begun; the next call asks for them again."""
        cancelled = [future.cancel() for future in self._under_way]
        self._asked = self._asked and not any(cancelled)

    def _compile(self, compile_size: Callable[[int], Any], size: int) -> None:
        if size not in self._ready:
            try:
                with switching_often():
                    self._ready[size] = compile_size(size)
            except Exception as error:  # larger programs serve, too
                _log.warning("a program for %d answers was not compiled: %s", size, error)


def _fewer(slots: int) -> list[int]:
    """Return smaller numbers of sequences: multiples of a step, and below it halves, as reading the weights is left."""
    step = max(_STEP, slots // _PARTS)
    sizes = list(range((slots - 1) // step * step, 0, -step))
    while (half := min(sizes, default=slots) // 2) >= max(_SMALLEST_SIZE, slots // _PARTS):
        sizes.append(half)
    return sizes


_intervals = list[float]()
"""Switch intervals found by those that take turns often, the first of which is put back."""


@contextmanager
def switching_often() -> Iterator[None]:
    """Let Python's threads take turns every 0.2 ms: by default tracing or reading requests holds up dispatch for 5."""
    _intervals.append(sys.getswitchinterval())
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(_intervals.pop())  # the first one's, once the last has ended
