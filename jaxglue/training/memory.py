"""Memory of GPUs and host for a model in training: JAX's pools as settings and plan say, before weights load."""

import gc
import math
import os
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import jax
from jax.extend.backend import clear_backends

from jaxglue.engine.host_buffers import Buffers, HostBuffers, MeshBuffers
from jaxglue.engine.program_cache import keep_programs
from jaxglue.engine.residency import HOST
from jaxglue.planner.device_memory import bounded_pool, take_fitting_blocks
from jaxglue.planner.gpus import GIB
from jaxglue.planner.host_memory import DEFAULT_PINNED_GIB, HOST_LIMIT, available_memory
from jaxglue.planner.plan import gib
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.training.remat import RematChoice, local_gpus
from jaxglue.training.run import Setup

PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
"""Environment variable by which JAX pins its whole limit at once, for arrays and again for copies to them."""
_SLACK, _LOST = GIB, 0.03
"""Bytes of pinned memory for batches and results, and the share lost between values."""


@contextmanager
def configured_jax(cache: Path | None, memory_limit: float | None, *, processes: int = 1) -> Iterator[None]:
    """Bound the pool of a client of JAX that starts in the context, and keep its compiled programs.

    Args:
        cache: folder of these; None keeps none.
        memory_limit: of a GPU, GiB; None for JAX's share.
        processes: of the run.
    """
    if cache:
        keep_programs(cache, take_turns=processes == 1)
    take_fitting_blocks(os.environ)
    with bounded_pool(memory_limit, os.environ, exchanges=processes > 1):
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


def open_buffers(workload: Workload, remat: RematChoice) -> AbstractContextManager[Buffers | None]:
    """Return a context with page-locked buffers for a run's offloaded values on this process's GPUs.

    None on CPUs.

    Raises:
        ValueError: the host's memory was taken by others since the run was planned.
    """
    if not remat.offloaded_bytes or jax.default_backend() == "cpu":
        return nullcontext()
    count = local_gpus(workload)
    if (needed := count * remat.offloaded_bytes) > (free := available_memory()):
        raise ValueError(
            f"--remat {remat.remat} offloads {gib(needed)} to host memory, of which {gib(free)} are "
            "free: end other programs, or choose a policy that offloads less"
        )
    devices = jax.local_devices()[:count]
    if workload.mesh.devices == 1:
        return HostBuffers(devices[0], remat.offloaded_bytes)
    return MeshBuffers(devices, remat.offloaded_bytes)


def size_pool(workload: Workload, remat: RematChoice, environ: MutableMapping[str, str]) -> int:
    """Renew JAX's client with the limit that streamed weights need; return its GiB, 0 where the limit stays.

    JAX's pool doubles up to its limit, which a client reads when it begins. The limit stays where no weights are
    streamed, in runs of several processes, where the caller set `PREALLOCATE`, and where arrays exist, which would not
    survive.

    Raises:
        ValueError: the old client is still in use and holds the GPU's memory.
    """
    if HOST not in remat.weights or not _is_alone() or PREALLOCATE in environ:
        return 0
    gc.collect()
    if jax.live_arrays():
        return 0
    size = pinned_gib(workload, remat, float(environ.get(HOST_LIMIT, DEFAULT_PINNED_GIB)))
    environ[HOST_LIMIT] = str(size)
    _renew_client()
    return size


def restore_pool(environ: MutableMapping[str, str], limit: str | None) -> None:
    """Renew JAX's client with the limit of pinned memory before `size_pool`, where that set another.

    Where arrays exist, which would not survive, the client and its limit stay.
    """
    gc.collect()
    if environ.get(HOST_LIMIT) == limit or jax.live_arrays():
        return
    if limit is None:
        del environ[HOST_LIMIT]
    else:
        environ[HOST_LIMIT] = limit
    _renew_client()


def pinned_gib(workload: Workload, remat: RematChoice, limit: float) -> int:
    """Return the whole GiB to pin: the plan's and one of the largest arrays more, or the plan's within a limit."""
    frozen = abstract_parts(workload)[2]
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    least = local_gpus(workload) * (remat.host_bytes - remat.offloaded_bytes) + _SLACK
    return math.ceil(max(least, min((1 + _LOST) * least + largest, limit * GIB)) / GIB)


def _is_alone() -> bool:
    """Return whether one process trains on GPUs."""
    return jax.process_count() == 1 and jax.default_backend() != "cpu"


def _renew_client() -> None:
    client = weakref.ref(jax.local_devices()[0].client)
    clear_backends()
    for _ in range(4):  # JAX's own check of a leak takes as many, for cycles through tracebacks
        gc.collect()
    if client() is not None:
        raise ValueError(
            "JAX's pool of pinned memory cannot be sized for the streamed weights, as its first client is in use: "
            f"set {PREALLOCATE}=false to let it grow"
        )
