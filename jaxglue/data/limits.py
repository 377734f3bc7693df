"""Limits on foreign code: a chat template may loop for ever, or ask for all memory."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

SECONDS = 10
"""CPU time for the renderings of one row, or for matching names."""
_BYTES = 4 * 2**30
"""Memory that the renderings of a chunk of rows may take."""
_limited = False
"""The process's memory is limited."""


class TemplateTimeoutError(ValueError):
    """A chat template that takes too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds` of CPU time; only the main thread can be interrupted.

    Within another limit, that one holds.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return
    _install()
    # Again and again: an exception raised inside a garbage collector's callback is swallowed.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@contextmanager
def pattern_time_limit() -> Iterator[None]:
    """Raise ValueError in the body where a regular expression takes longer than any that is of use."""
    try:
        with time_limit(SECONDS):
            yield
    except TimeoutError:
        raise ValueError(f"a regular expression takes more than {SECONDS} s: write a simpler one") from None


@contextmanager
def template_time_limit() -> Iterator[None]:
    """Raise ValueError in the body after the CPU time that a chat template has for a row."""
    try:
        with time_limit(SECONDS):
            yield
    except TimeoutError:
        raise TemplateTimeoutError(
            f"the chat template takes more than {SECONDS} s of CPU time: split the conversation, or give a "
            "template with {% generation %} markers, which is faster"
        ) from None


@contextmanager
def memory_limit() -> Iterator[None]:
    """Raise MemoryError in the body beyond the process's present address space and 4 GiB more.

    Within another limit, that one holds.
    """
    global _limited
    if _limited:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (present + _BYTES, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    _limited = True
    try:
        yield
    finally:
        _limited = False
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@cache
def _install() -> None:
    """Install the timer's handler, once for all rows: it takes longer than the timer."""
    signal.signal(signal.SIGVTALRM, _expire)


def _expire(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError
