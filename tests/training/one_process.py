"""One process of a run that can kill itself."""

import os
import signal
from collections.abc import Sequence

from jaxglue.commands import run
from jaxglue.training.step import TrainStep


def train_or_die(die_before: int, arguments: Sequence[str]) -> None:
    """Run `jaxglue train`; die right before the step `die_before`, if that is not negative."""
    dispatch = TrainStep.dispatch

    def dispatch_or_die(self, batch):
        if self.step == die_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return dispatch(self, batch)

    TrainStep.dispatch = dispatch_or_die
    run("train", arguments)
