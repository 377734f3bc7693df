"""Runs `scripts/train.py` with the arguments after the first, which names a step before which this process dies."""

import os
import runpy
import signal
import sys
from pathlib import Path

from jaxglue.training.trainer import Trainer

die_before = int(sys.argv.pop(1))
dispatch = Trainer._dispatch_step


def dispatch_or_die(self):
    if self._step == die_before:
        os.kill(os.getpid(), signal.SIGKILL)
    return dispatch(self)


Trainer._dispatch_step = dispatch_or_die
runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train.py"), run_name="__main__")
