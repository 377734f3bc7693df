"""Standard output that outlives its reader."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

_CLOSED = {errno.EPIPE, errno.EIO, errno.EBADF}


class Output:
    """Standard output; once its terminal or pipe is closed, calls `closed` and writes to nowhere.

    Lines that a full disk refuses are dropped.
    """

    def __init__(self, closed: Callable[[], None]):
        self._closed = closed

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        with self._dropping():
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        with self._dropping():
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    @contextlib.contextmanager
    def _dropping(self):
        try:
            yield
        except OSError as error:
            if error.errno in _CLOSED:
                _discard_output()
                self._closed()


def _discard_output() -> None:
    """Point standard output to nowhere, so that later writes and the exit succeed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
