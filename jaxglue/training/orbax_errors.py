"""Errors of the storage library, in one line each."""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_SHORTEST = 8
"""Characters of a cause that says something by itself."""


def reason_of(error: Exception) -> str:
    """Shorten an error to its cause, without the paths that the storage library adds."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = re.split(r"\n| \[(?:os_error_code|tensorstore_spec)|\. See full", str(error), maxsplit=1)[0]
    cause = message.rpartition(": ")[2]
    return (cause if len(cause) >= _SHORTEST and cause[0] != "(" else message)[:200] or type(error).__name__


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silence Orbax's background threads, which log and print tracebacks of errors that it raises anyway."""
    hook = sys.unraisablehook
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = partial(_print_unless_abandoned, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def silence_abandoned_writes() -> None:
    """Silence reports of abandoned writes, which are collected as late as the process's exit."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = partial(_print_unless_abandoned, sys.unraisablehook)


def _print_unless_abandoned(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Drop the error of a write that ends after its event loop, and pass on all others."""
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)
