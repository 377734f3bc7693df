"""Pinned host memory in the size that the plan needs."""

import gc
import math
import weakref
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext

import jax
from jax.extend.backend import clear_backends

from jaxglue.engine.host_buffers import HostBuffers
from jaxglue.engine.residency import HOST
from jaxglue.planner.gpus import GIB
from jaxglue.planner.host_memory import DEFAULT_PINNED_GIB, HOST_LIMIT, available_memory
from jaxglue.planner.plan import gib
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.training.remat import RematChoice

PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
"""Environment variable by which JAX pins its whole limit at once, for arrays and again for copies to them."""
_SLACK, _LOST = GIB, 0.03
"""Bytes of pinned memory for batches and results, and the share lost between values."""


def open_buffers(workload: Workload, remat: RematChoice) -> AbstractContextManager[HostBuffers | None]:
    """Return a context with page-locked buffers for a run's offloaded values; None on CPUs, and on several GPUs.

    Raises:
        ValueError: the host's memory was taken by others since the run was planned.
    """
    if not remat.offloaded_bytes or not _is_alone(workload):
        return nullcontext()
    if remat.offloaded_bytes > (free := available_memory()):
        raise ValueError(
            f"--remat {remat.remat} offloads {gib(remat.offloaded_bytes)} to host memory, of which {gib(free)} are "
            "free: end other programs, or choose a policy that offloads less"
        )
    return HostBuffers(jax.local_devices()[0], remat.offloaded_bytes)


def size_pool(workload: Workload, remat: RematChoice, environ: MutableMapping[str, str]) -> int:
    """Renew JAX's client with the limit that streamed weights need; return its GiB, 0 where the limit stays.

    JAX's pool doubles up to its limit, which a client reads when it begins. The limit stays where no weights are
    streamed, on several GPUs, where the caller set `PREALLOCATE`, and where arrays exist, which would not survive.

    Raises:
        ValueError: the old client is still in use and holds the GPU's memory.
    """
    if HOST not in remat.weights or not _is_alone(workload) or PREALLOCATE in environ:
        return 0
    gc.collect()
    if jax.live_arrays():
        return 0
    size = pool_gib(workload, remat, float(environ.get(HOST_LIMIT, DEFAULT_PINNED_GIB)))
    environ[HOST_LIMIT] = str(size)
    _renew_client()
    return size


def pool_gib(workload: Workload, remat: RematChoice, limit: float) -> int:
    """Return the whole GiB to pin: the plan's and one of the largest arrays more, or the plan's within a limit."""
    frozen = abstract_parts(workload)[2]
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    least = remat.host_bytes - remat.offloaded_bytes + _SLACK
    return math.ceil(max(least, min((1 + _LOST) * least + largest, limit * GIB)) / GIB)


def _is_alone(workload: Workload) -> bool:
    """Return whether one process trains on one GPU."""
    return workload.mesh.devices == 1 and jax.process_count() == 1 and jax.default_backend() != "cpu"


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
