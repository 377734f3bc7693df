"""Steps that take more memory than there is: the run planned again with less, or the remedy."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax

from jaxglue.engine.policy import AUTO
from jaxglue.planner.device_memory import outside_pool, pool_gib
from jaxglue.planner.gpus import GIB, RECORDED
from jaxglue.planner.plan import MARGIN, DoesNotFit
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.training.record import memory_use
from jaxglue.training.remat import choose_remat, host_memory, local_gpus
from jaxglue.training.run import Run

_LESS = 0.85
"""Share of the planned memory that the next plan may use."""
_AFTER_FAILURE = 0.8
"""Share of the pool, or of the last plan's, that the next plan may use after a failed allocation.

The rest of the step may need more than was asked for, and free memory may be in pieces.
"""
_ASKED = re.compile(r"allocat\w* ([\d.]+) ?(B|bytes|KiB|MiB|GiB|TiB)\b")
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemory(ValueError):  # noqa: N818
    """Reports that a device ran out of memory during a run."""


@contextlib.contextmanager
def explained_out_of_memory(run: Run) -> Iterator[None]:
    """Turn XLA's and Python's errors of memory into an OutOfMemory that names the remedy."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(_explanation(run)) from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error is of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


class Overrun(NamedTuple):
    """Memory of a GPU that a run took in its first step, or asked for, beyond what there is, bytes."""

    taken: float
    pool: float
    """JAX's pool, or what `--memory-limit` leaves it."""
    exhausted: bool
    """An allocation failed."""


def failed_allocation(run: Run, message: str) -> Overrun:
    """Return the overrun of a step in which an allocation failed with XLA's message."""
    found, devices = _ASKED.search(message), jax.local_devices()
    asked = float(found[1]) * _UNITS[found[2]] if found else 0.0
    limits = (stats["bytes_limit"] for device in devices if (stats := device.memory_stats()) and "bytes_limit" in stats)
    pool = min([*limits, *_pool_within(run)], default=0.0)
    return Overrun(max(memory_use(devices).peak + asked, pool), pool, exhausted=True)


def memory_beyond_limit(run: Run, before: int) -> Overrun | None:
    """Return the overrun of a step that took more than `--memory-limit` leaves JAX's pool; None within it.

    Args:
        run: of the step.
        before: peak of the memory in use before it, bytes, which does not count.
    """
    use = memory_use(jax.local_devices())
    over = (pool for pool in _pool_within(run) if use.kind == "device" and use.peak > max(pool, before))
    return next((Overrun(use.peak, pool, exhausted=False) for pool in over), None)


def _pool_within(run: Run) -> list[float]:
    """Return the bytes that `--memory-limit` leaves JAX's pool, if it is given."""
    pool = pool_gib(run.asked.memory_limit, exchanges=run.mesh.devices > 1)
    return [] if pool is None else [pool * GIB]


def smaller_pool(run: Run, overrun: Overrun, before: float | None) -> float:
    """Return the bytes of the pool to plan with, by the bytes taken, and less with every failure after `before`."""
    pool = min(overrun.pool, before) if overrun.exhausted and before else overrun.pool
    return _less(run, overrun) * pool


def plan_again(run: Run, overrun: Overrun, pool: float) -> Run:
    """Return the run after an overrun, planned with a smaller pool, bytes.

    Raises:
        OutOfMemory: nothing fits.
    """
    try:
        workload = replace(run.workload, host_embeddings=run.asked.embeddings == "host")
        remat = choose_remat(run.asked, workload, run.schedule.total_steps, pool=pool / GIB)
    except DoesNotFit as error:
        raise OutOfMemory(f"{describe(run, overrun)}, and nothing else fits in {pool / GIB:.1f}: {error}") from error
    return replace(run, remat=remat, workload=replace(workload, host_embeddings=remat.host_embeddings))


def describe(run: Run, overrun: Overrun) -> str:
    """Describe the memory that a run took, beside its limit and its plan."""
    limit, planned = run.asked.memory_limit, run.remat.device_bytes
    took, pool = "the run asked for" if overrun.exhausted else "the first step took", f"{overrun.pool / GIB:.1f}"
    pool = f"the {pool} that --memory-limit {limit:g} leaves" if limit else f"the {pool} of JAX's pool"
    note = f" ({planned / GIB:.1f} planned)" if planned else ""
    return f"{took} {overrun.taken / GIB:.1f} GiB of the GPU, above {pool}{note}"


def smaller_limit(run: Run, overrun: Overrun) -> str:
    """Return the flag with which a new run would be planned within its limit, as far as this one tells."""
    limit = (_less(run, overrun) * overrun.pool + outside_pool(exchanges=run.mesh.devices > 1)) / GIB
    return f"--memory-limit {limit:.1f}"


def _less(run: Run, overrun: Overrun) -> float:
    """Return the share of the pool to plan with: planned over taken memory, if the whole step is known."""
    planned = run.remat.device_bytes / overrun.taken if run.remat.device_bytes else 1.0
    return min(planned, _AFTER_FAILURE if overrun.exhausted else 1 - MARGIN)


def _explanation(run: Run) -> str:
    use = memory_use(jax.local_devices())
    where = "the GPU" if use.kind == "device" else "the host"
    planned = f"--remat {run.remat.remat!r}{run.remat.note}"
    rows = f"{run.workload.batch_size} × {run.workload.seq_len:,} tokens"
    return (
        f"{where} ran out of memory, with {use.peak / GIB:.1f} GiB in use at most; planned was {planned}, with {rows}. "
        f"{_remedy(run) if use.kind == 'device' else 'Lower --batch-size or --seq-len'}. "
        "If this run has a checkpoint, that is intact: continue with --resume"
    )


def _remedy(run: Run) -> str:
    """Return the fastest plan that needs clearly less memory than the failed one, as flags."""
    gpu = device_gpu(jax.local_devices()[0], RECORDED)  # nothing is measured on a GPU that is full
    planner = Planner(run.workload, gpu)
    failed = planner.plan(run.remat.policies, weights=run.remat.weights)
    limit = _LESS * min(failed.device_bytes, planner.gpu.memory) / GIB
    try:
        pinned = planner.gpu.host_memory(host_memory()) / local_gpus(run.workload)
        plan = Planner(run.workload, planner.gpu.limited(limit)).choose(host_memory=pinned, weights=AUTO)
    except DoesNotFit as error:
        return f"With {limit:.1f} GiB, {error}"
    return f"{plan} is predicted to need {plan.device_bytes / GIB:.1f} GiB; or lower --batch-size or --seq-len"
