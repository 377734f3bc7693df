"""One process of a run that can kill itself."""

import os
import signal
from collections.abc import Sequence

from jaxglue.commands import run
from jaxglue.training import loop


def train_or_die(die_before: int, arguments: Sequence[str]) -> None:
    """Run `jaxglue train`; die right before the step `die_before`, if that is not negative."""
    train_step = loop.train_step

    def train_or_die(parts, state, *arguments):
        if state.step == die_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(parts, state, *arguments)

    loop.train_step = train_or_die
    run("train", arguments)
