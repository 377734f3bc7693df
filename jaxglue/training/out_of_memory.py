"""One line for a device that ran out of memory: its plan, and a setting that would fit."""

import contextlib
from collections.abc import Iterator

import jax

from jaxglue.engine.policy import AUTO
from jaxglue.planner.gpus import GIB, RECORDED
from jaxglue.planner.plan import DoesNotFit
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.training.remat import host_memory
from jaxglue.training.setup import Setup
from jaxglue.training.throughput import memory_use

_LESS = 0.85
"""Share of the planned memory that the next plan may use."""


class OutOfMemory(ValueError):  # noqa: N818
    """Reports that a device ran out of memory during a run."""


@contextlib.contextmanager
def explained_out_of_memory(setup: Setup) -> Iterator[None]:
    """Turn XLA's and Python's errors of memory into an OutOfMemory that names the remedy."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemory(_explanation(setup)) from error
        raise


def _explanation(setup: Setup) -> str:
    use = memory_use(jax.local_devices())
    where = "the GPU" if use.kind == "device" else "the host"
    planned = f"--remat {setup.remat.remat!r}{setup.remat.note}"
    rows = f"{setup.workload.batch_size} × {setup.workload.seq_len:,} tokens"
    return (
        f"{where} ran out of memory, with {use.peak / GIB:.1f} GiB in use at most; planned was {planned}, with {rows}. "
        f"{_remedy(setup) if use.kind == 'device' else 'Lower --batch-size or --seq-len'}. "
        "Any checkpoint is intact: continue with --resume"
    )


def _remedy(setup: Setup) -> str:
    """Return the fastest plan that needs clearly less memory than the failed one, as flags."""
    gpu = device_gpu(jax.local_devices()[0], RECORDED)  # nothing is measured on a GPU that is full
    planner = Planner(setup.workload, gpu)
    failed = planner.plan(setup.remat.policies, weights=setup.remat.weights)
    limit = _LESS * min(failed.device_bytes, planner.gpu.memory) / GIB
    try:
        plan = Planner(setup.workload, planner.gpu.limited(limit)).choose(host_memory=host_memory(), weights=AUTO)
    except DoesNotFit as error:
        return f"With {limit:.1f} GiB, {error}"
    return f"{plan} is predicted to need {plan.device_bytes / GIB:.1f} GiB; or lower --batch-size or --seq-len"
