"""JAX's pool of a GPU's memory: its end, within a limit of the process, and its blocks."""

import contextlib
import ctypes
from collections.abc import Iterator, MutableMapping, Sequence

import jax
import numpy as np

from jaxglue.planner import calibration as fitted
from jaxglue.planner.gpus import GIB

POOL_SHARE = "XLA_CLIENT_MEM_FRACTION"
"""Environment variable with the share of a GPU's memory that JAX's pool takes."""
_OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Its name in older versions of JAX, which still counts."""
_DEFAULT_SHARE = 0.75
_MOST = 0.9
"""Largest share of a GPU's memory for the pool."""
_LOWEST_BLOCKS = "xla_gpu_enable_allocator_spatial_partitioning"
_SMALL_BLOCKS, _SMALL = 64, 2**16
"""Blocks for small arrays, and their bytes."""


def outside_pool(*, exchanges: bool = False) -> float:
    """Return the bytes of a GPU that a process takes beside JAX's pool; more where it exchanges with other GPUs."""
    return fitted.OUTSIDE_POOL + (fitted.COLLECTIVES_MEMORY if exchanges else 0)


def pool_gib(limit: float | None, *, exchanges: bool = False) -> float | None:
    """Return the GiB of JAX's pool within a limit of the process, GiB, without the rest; None without a limit."""
    return None if limit is None else max(limit - outside_pool(exchanges=exchanges) / GIB, limit / 2)


def largest_share(*, exchanges: bool) -> float:
    """Return the share of a GPU's memory that JAX's pool may take beside the process's other memory."""
    total = total_memory() if exchanges else None
    return _MOST if total is None else min(_MOST, 1 - outside_pool(exchanges=True) / total)


def bound_pool(limit: float | None, environ: MutableMapping[str, str], *, exchanges: bool = False) -> None:
    """Let JAX, before it starts, end its pool where the process reaches a limit, GiB: allocations beyond it fail."""
    pool, total = pool_gib(limit, exchanges=exchanges), total_memory() if limit else None
    if pool is None or not total:
        return
    name = POOL_SHARE if POOL_SHARE in environ else _OLD_NAME
    share = float(environ.get(name, _DEFAULT_SHARE))
    environ[name] = f"{min(share, pool * GIB / total):.6f}"


@contextlib.contextmanager
def bounded_pool(limit: float | None, environ: MutableMapping[str, str], *, exchanges: bool = False) -> Iterator[None]:
    """Bound the pool of a client of JAX that starts, or starts anew, in the context."""
    before = {name: environ.get(name) for name in (POOL_SHARE, _OLD_NAME)}
    bound_pool(limit, environ, exchanges=exchanges)
    try:
        yield
    finally:
        for name, value in before.items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value


def take_fitting_blocks(environ: MutableMapping[str, str]) -> None:
    """Let XLA, before it starts, place each array in the smallest free block of its pool that holds it.

    By default jaxlib 0.11.2 takes the lowest, so that small arrays break up those of programs' temporary memory.
    """
    flags = environ.get("XLA_FLAGS", "")
    if _LOWEST_BLOCKS not in flags:
        environ["XLA_FLAGS"] = f"{flags} --{_LOWEST_BLOCKS}=false".strip()


def leave_small_blocks(devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Leave free blocks for small arrays in a pool that has one, between arrays to be held.

    Without them a loss that outlives its step parts the largest block, and the next step's program finds no place.
    """
    small = np.zeros(_SMALL, np.uint8)
    arrays = [jax.device_put(small, device) for device in devices for _ in range(2 * _SMALL_BLOCKS)]
    jax.block_until_ready(arrays)
    return arrays[::2]


def total_memory() -> int | None:
    """Return the bytes of this process's largest GPU, from CUDA's driver; None on CPUs, or without the driver."""
    if jax.config.jax_platforms == "cpu":
        return None
    with contextlib.suppress(OSError):
        cuda, count, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return None
        sizes = []
        for ordinal in range(count.value):
            cuda.cuDeviceGet(ctypes.byref(device), ordinal)
            cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            sizes.append(size.value)
        return max(sizes, default=None)
    return None
