"""JAX's pool of pinned host memory in the size that the plan needs."""

import gc
import math
import weakref
from collections.abc import MutableMapping

import jax
from jax.extend.backend import clear_backends

from jaxglue.engine.residency import HOST
from jaxglue.planner.gpus import GIB
from jaxglue.planner.plans import HOST_LIMIT
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.training.remat import RematChoice

PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
"""Environment variable by which JAX pins its whole limit at once, for arrays and again for copies to them."""
_SLACK = GIB
"""Pinned memory for batches and results, and lost at the ends of the pool's regions."""


def size_pool(workload: Workload, remat: RematChoice, environ: MutableMapping[str, str]) -> int:
    """Renew JAX's client with the limit that a run needs; return its GiB, 0 where the limit stays.

    JAX's pool doubles up to its limit, which a client reads when it begins. The limit stays where no weights are
    streamed, on several GPUs, where the caller set `PREALLOCATE`, and where arrays exist, which would not survive.

    Raises:
        ValueError: the old client is still in use and holds the GPU's memory.
    """
    streams = HOST in remat.weights and workload.mesh.devices == 1 and jax.process_count() == 1
    if not streams or PREALLOCATE in environ or jax.default_backend() == "cpu":
        return 0
    gc.collect()
    if jax.live_arrays():
        return 0
    size = pool_gib(workload, remat.host_bytes)
    environ[HOST_LIMIT] = str(size)
    _renew_client()
    return size


def pool_gib(workload: Workload, host_bytes: int) -> int:
    """Return the whole GiB to pin: the plan's, and one of the largest tensors more."""
    frozen = abstract_parts(workload)[2]
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    return math.ceil((host_bytes + largest + _SLACK) / GIB)


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
