"""JAX's pool of pinned host memory in the size that the plan needs."""

import contextlib
import gc
import math
import threading
import weakref
from collections.abc import MutableMapping

import jax
import jax.numpy as jnp
from jax.extend.backend import clear_backends

from jaxglue.engine.pinning import pin
from jaxglue.engine.residency import HOST
from jaxglue.ops.names import GATE, UP
from jaxglue.planner.gpus import GIB
from jaxglue.planner.plans import DEFAULT_PINNED_GIB, HOST_LIMIT
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.training.remat import RematChoice

PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
"""Environment variable by which JAX pins its whole limit at once, for arrays and again for copies to them."""
_SLACK, _LOST = GIB, 0.03
"""Bytes of pinned memory for batches and results, and the share lost between values."""
_GROWN = 2**28
"""Bytes of the pool that may be taken before it is pinned as a whole."""


def size_pool(workload: Workload, remat: RematChoice, environ: MutableMapping[str, str]) -> int:
    """Renew JAX's client with the limit that a run needs; return its GiB, 0 where the limit stays.

    JAX's pool doubles up to its limit, which a client reads when it begins. The limit stays where nothing is offloaded
    and no weights are streamed, on several GPUs, where the caller set `PREALLOCATE`, and where arrays exist, which
    would not survive. Without streamed weights the pool is pinned as one region, in a thread.

    Raises:
        ValueError: the old client is still in use and holds the GPU's memory.
    """
    streams, offloads = HOST in remat.weights, any(policy.offloaded for policy in remat.policies)
    alone = workload.mesh.devices == 1 and jax.process_count() == 1
    if not alone or not (streams or offloads) or PREALLOCATE in environ or jax.default_backend() == "cpu":
        return 0
    gc.collect()
    if jax.live_arrays():
        return 0
    size = pool_gib(workload, remat, float(environ.get(HOST_LIMIT, DEFAULT_PINNED_GIB)))
    environ[HOST_LIMIT] = str(size)
    _renew_client()
    if not streams:  # whose loading would take smaller regions meanwhile
        threading.Thread(target=_pin, args=(size * GIB - _GROWN,), name="pinning", daemon=True).start()
    return size


def pool_gib(workload: Workload, remat: RematChoice, limit: float) -> int:
    """Return the whole GiB to pin: the plan's and one of the largest arrays more, or the plan's within a limit."""
    frozen, config = abstract_parts(workload)[2], workload.config
    offloaded = frozenset[str]().union(*(policy.offloaded for policy in remat.policies))
    width = config.intermediate_size if offloaded & {GATE, UP} else config.hidden_size
    value = workload.tokens * width * jnp.dtype(workload.dtype).itemsize if offloaded else 0
    largest = max(value, *(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen)))
    least = remat.host_bytes + _SLACK
    return math.ceil(max(least, min((1 + _LOST) * least + largest, limit * GIB)) / GIB)


def _pin(size: int) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the pool grows as it is used
        pin(size)


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
