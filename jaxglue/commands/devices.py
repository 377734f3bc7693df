"""Preparation of the accelerator before a command's modules are imported."""

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from jaxglue.distributed import find_process_info, visible_gpus

if TYPE_CHECKING:
    from jaxglue.training.config import TrainConfig

_IN_FLIGHT = 1024
"""Programs that the host may dispatch ahead of the GPU."""


def start_devices(config: "TrainConfig") -> None:
    """Open this machine's devices in the background; a run of several processes opens them later, together."""
    import jax

    from jaxglue.planner.device_memory import bound_pool, largest_share, take_fitting_blocks
    from jaxglue.planner.host_memory import raise_pinned_limit

    alone = find_process_info(config.distributed, os.environ) is None
    exchanges = not alone or len(visible_gpus()) > 1
    # JAX reserves only three quarters of the GPU by default. Read at JAX's first device query.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{largest_share(exchanges=exchanges):.4f}")
    bound_pool(config.model.memory_limit, os.environ, exchanges=exchanges)
    take_fitting_blocks(os.environ)
    if alone:
        raise_pinned_limit(os.environ)
        threading.Thread(target=_open, args=(jax,), daemon=True).start()


def dispatch_far_ahead() -> None:
    """Let the host dispatch more programs ahead of a GPU than JAX's 32, unless JAX's own setting names a number.

    A row of prompts is a program for each layer. The host would wait for most of these before it dispatched the window
    behind them, and before it read the tokens of the window in front.
    """
    import jax

    if visible_gpus() and jax.config.jax_pjrt_client_create_options is None:
        jax.config.update("jax_pjrt_client_create_options", {"max_inflight_computations": _IN_FLIGHT})


def _open(jax: Any) -> None:
    with contextlib.suppress(Exception):  # the run's own query raises it again
        jax.device_put(0).block_until_ready()  # a GPU's first transfer takes seconds too


def use_cache(config: Any) -> None:
    """Keep compiled programs in the folder of the settings, or where training keeps them by default."""
    from jaxglue.engine.program_cache import explain_cache_errors, keep_programs
    from jaxglue.training.config import RunConfig

    folder = getattr(config, "compilation_cache", RunConfig.compilation_cache)
    if folder is not None:
        keep_programs(folder)
    explain_cache_errors()
