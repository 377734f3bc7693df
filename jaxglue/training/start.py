"""Start of JAX for a model in training, as settings and plan say: before its first use, and before weights load."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from jaxglue.engine.host_buffers import Buffers
from jaxglue.engine.program_cache import keep_programs
from jaxglue.planner.device_memory import bounded_pool, take_fitting_blocks
from jaxglue.training.config import TrainConfig
from jaxglue.training.remat import open_buffers, size_pool
from jaxglue.training.setup import Setup


@contextmanager
def configured_jax(config: TrainConfig, *, processes: int = 1) -> Iterator[None]:
    """Bound the pool of a client of JAX that starts in the context, and keep its compiled programs."""
    if config.run.compilation_cache:
        keep_programs(config.run.compilation_cache, take_turns=processes == 1)
    take_fitting_blocks(os.environ)
    with bounded_pool(config.model.memory_limit, os.environ, exchanges=processes > 1):
        yield


@contextmanager
def planned_memory(setup: Setup) -> Iterator[Buffers | None]:
    """Provide the host memory of a plan: JAX's pool, and buffers for offloaded values, which are yielded.

    Raises:
        ValueError: as `size_pool` and `open_buffers`.
    """
    size_pool(setup.workload, setup.remat, os.environ)
    with open_buffers(setup.workload, setup.remat) as buffers:
        yield buffers
