"""Limits on foreign code: a chat template may loop for ever."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 10
"""CPU time for the renderings of one row."""


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds` of CPU time; only the main thread can be interrupted so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _expire(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
