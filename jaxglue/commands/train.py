"""Fine-tune a model: `jaxglue train --model FOLDER --data chats.jsonl`, or `--recipe RECIPE.toml`."""

import os
import sys

from jaxglue.distributed import find_process_info, join_processes
from jaxglue.engine.program_cache import explain_cache_errors
from jaxglue.planner.host_memory import raise_pinned_limit
from jaxglue.terminal.interrupt import Interrupt
from jaxglue.training.config import TrainConfig
from jaxglue.training.progress import StartupTimer
from jaxglue.training.train import train


def main(config: TrainConfig) -> None:
    """Train, with the run's other processes if there are any; exit with 130 or 143 if interrupted."""
    explain_cache_errors()
    timer, interrupt = StartupTimer.since_process_start(), Interrupt()
    with join_processes(find_process_info(config.distributed, os.environ)) as processes:
        if processes.count == 1:
            raise_pinned_limit(os.environ)
        train(config, timer=timer, processes=processes, interrupt=interrupt)
    if interrupt.number:
        sys.exit(interrupt.status)
