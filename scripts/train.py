"""Fine-tune a model: `python scripts/train.py --model FOLDER --data chats.jsonl`, or `--config RECIPE.toml`."""

import logging
import os

from jaxglue.cli import parse_config, user_errors
from jaxglue.distributed import find_process_info, join_processes, visible_gpus
from jaxglue.training.config import TrainConfig
from jaxglue.training.startup import StartupTimer
from jaxglue.training.trainer import train


def main() -> None:
    # JAX reserves only three quarters of the GPU by default; NCCL needs some. Read at JAX's first device query.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9" if len(visible_gpus()) < 2 else "0.8")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    config = parse_config(TrainConfig)
    timer = StartupTimer.since_process_start()
    with user_errors(), join_processes(find_process_info(config.distributed, os.environ)) as processes:
        train(config, timer=timer, processes=processes)


if __name__ == "__main__":
    main()
