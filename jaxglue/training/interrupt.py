"""Ctrl-C and SIGTERM: finish the step, save, exit."""

import os
import signal
from types import FrameType
from typing import Self


class Interrupt:
    """Context in which a first SIGINT or SIGTERM sets `requested` and a second one raises KeyboardInterrupt.

    Enter it in Python's main thread, the only one that receives signals.
    """

    requested = False
    """Whether to save and exit after the current step."""

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested:
            raise KeyboardInterrupt(f"second signal ({name}) before the checkpoint was saved")
        self.requested = True
        # The handler may interrupt a print, which cannot be re-entered.
        os.write(2, f"\n{name}: saving a checkpoint and exiting after this step; once more to exit at once\n".encode())
