"""Interruptions of a run: Ctrl-C, SIGTERM, a closed terminal, and the end of the reader of its output."""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSED = {errno.EPIPE, errno.EIO, errno.EBADF}


class SecondSignal(KeyboardInterrupt):
    """A signal after the one that asked to stop."""

    def __init__(self, number: int):
        super().__init__(f"second signal ({signal.Signals(number).name}) before the checkpoint was saved")
        self.number = number


class Interrupt:
    """Context in which a first signal asks to stop and a second one raises KeyboardInterrupt.

    SIGHUP, the end of the terminal, counts unless it is ignored, as under `nohup`. Only Python's main thread receives
    signals: entered in another, it leaves them alone.
    """

    number: int = 0
    """The signal after which to save and exit; 0 without any."""

    @property
    def status(self) -> int:
        """Return the exit status of a stopped run, as shells have it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number

    def output_closed(self) -> None:
        """Ask to stop because nobody reads the output any more, unless told by `nohup` to go on."""
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self.number = self.number or signal.SIGPIPE

    def __enter__(self) -> Self:
        signals = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
        heard = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # A closed terminal sends SIGHUP after the write that found it closed, or twice: neither asks for haste.
        if self.number and number != signal.SIGHUP:
            raise SecondSignal(number)
        self.number = self.number or number
        # The handler may interrupt a print, which cannot be re-entered.
        line = f"\n{name}: saving a checkpoint and exiting after this step; once more to exit at once\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())


class GuardedOutput:
    """Standard output of now, however redirected later; once its reader is gone, calls `closed` and writes to nowhere.

    Lines that a full disk refuses are dropped.
    """

    def __init__(self, closed: Callable[[], None]):
        self._closed, self._stream = closed, sys.stdout

    @property
    def rich_proxied_file(self) -> "GuardedOutput":
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
