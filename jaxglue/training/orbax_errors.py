"""Errors of the storage library, in one line each."""

import contextlib
import logging
import re
from collections.abc import Iterator


def reason_of(error: Exception) -> str:
    """Shorten an error to its cause, without the paths that the storage library adds."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = re.split(r"\n| \[(?:os_error_code|tensorstore_spec)", str(error), maxsplit=1)[0]
    return message.rpartition(": ")[2][:200] or type(error).__name__


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silence Orbax's background threads, which log tracebacks of errors that it raises anyway."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
