"""Standard output that outlives its reader."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

_CLOSED = {errno.EPIPE, errno.EIO, errno.EBADF}


class Output:
    """Standard output of now, however redirected later; once its reader is gone, calls `closed` and writes to nowhere.

    Lines that a full disk refuses are dropped.
    """

    def __init__(self, closed: Callable[[], None]):
        self._closed, self._stream = closed, sys.stdout

    @property
    def rich_proxied_file(self) -> "Output":
        """Return itself to rich, which would write past it while a bar is shown."""
        return self

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the text, or drop it."""
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self):
        try:
            yield
        except OSError as error:
            if error.errno in _CLOSED:
                self._discard()
                self._closed()

    def _discard(self) -> None:
        """Point the stream to nowhere, so that later writes and the exit succeed."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
