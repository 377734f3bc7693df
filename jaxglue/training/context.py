"""The surroundings of a run."""

from dataclasses import dataclass

from jaxglue.distributed import Processes
from jaxglue.terminal.console import Console
from jaxglue.terminal.interrupt import Interrupt
from jaxglue.training.callbacks import Callbacks, Metrics
from jaxglue.training.progress import StartupTimer


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The surroundings of a run: the arguments of `train` beside its configuration."""

    console: Console
    timer: StartupTimer
    processes: Processes
    interrupt: Interrupt
    callbacks: Callbacks
    compute_metrics: Metrics | None
