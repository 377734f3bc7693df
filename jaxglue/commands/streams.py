"""Standard streams that are closed, full, unread, or of another encoding than the text."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

STATUS = 128 + signal.SIGPIPE
"""Exit status once nobody reads the output, as shells have it."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Print what the context prints, characters that the encoding lacks as escapes.

    Raises:
        SystemExit: nobody reads the output any more.
        OSError: it cannot be written, as on a full disk.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        try:
            _flush()
        except BrokenPipeError:  # that of a worker or a peer is an error
            sys.exit(STATUS)


def _open_closed() -> None:
    """Open closed streams to nowhere: the next opened file would take their place, and receive what is printed."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _flush() -> None:
    """Flush standard output; where that fails, point it to nowhere, or Python would complain at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise
