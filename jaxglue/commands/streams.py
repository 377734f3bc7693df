"""Standard streams that are closed, full, unread, or of another encoding than the text."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

STATUS = 128 + signal.SIGPIPE
"""Exit status once nobody reads the output, as shells have it."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Print the context's output, with characters that the encoding lacks escaped.

    Raises:
        SystemExit: nobody reads the output any more.
        OSError: it cannot be written, as on a full disk.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            with contextlib.suppress(OSError):  # a file that was exchanged for a terminal
                reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            _flush()
    except BrokenPipeError:
        if not _is_unread():  # but the pipe of a worker or a peer
            raise
        sys.exit(STATUS)


def _open_closed() -> None:
    """Open closed streams to nowhere: the next opened file would take their place, and receive the output."""
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
        unread = _is_unread()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if unread:
            sys.exit(STATUS)
        raise


def _is_unread() -> bool:
    """Tell whether standard output is a pipe that nobody reads any more."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
