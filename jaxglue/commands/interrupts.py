"""Ctrl-C ends a command with one line and status 130, whenever it comes."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

STATUS = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells have it."""
_AGAIN_SECONDS = 0.05


class Interrupts:
    """Context in which Ctrl-C raises KeyboardInterrupt, again where a callback of a library swallowed it."""

    received = False
    """True after Ctrl-C, whose KeyboardInterrupt a library may turn into another exception."""
    importing = True
    """While set, Ctrl-C exits at once: a module that is being imported may catch KeyboardInterrupt, or print it."""

    def __enter__(self) -> Self:
        self._handler, self._hook = signal.signal(signal.SIGINT, self._handle), sys.unraisablehook
        sys.unraisablehook = self._installed = self._raise_again
        return self

    def __exit__(self, *error: object) -> None:
        if sys.unraisablehook is self._installed:
            sys.unraisablehook = self._hook
        signal.signal(signal.SIGINT, self._handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self.importing:
            os.write(2, b"\njaxglue: interrupted\n")
            os._exit(STATUS)
        raise KeyboardInterrupt

    def _raise_again(self, unraisable: Any) -> None:
        """Interrupt once more when an exception could not leave a callback, such as that of a garbage collection."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            main = threading.main_thread().ident
            threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, [main, signal.SIGINT]).start()
        else:
            self._hook(unraisable)

    _handler: Callable[[int, FrameType | None], Any] | int | None
    _hook: Callable[[Any], Any]
    _installed: Callable[[Any], Any]
