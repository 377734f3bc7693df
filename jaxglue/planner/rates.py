"""Rates of the GPU and the host at hand: from the table or, what depends on the machine or is not there, measured."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxglue.engine import transfer
from jaxglue.models.file_param import FileParam
from jaxglue.ops.backend import compute_capability
from jaxglue.planner import calibration as fitted
from jaxglue.planner.gpus import Dispatch, Gpu, lookup_gpu

_SIZE = 8192
_BYTES, _LINK_BYTES = 2**28, 2**26
"""Bytes of a copy. Those over the link come to any run's GPU, whose peak they should not raise."""
_CALLS, _ROUNDS = 4, 4
_SLOW_LINK = 0.9
"""Share of the data sheet's link below which the measured one counts: in a slot with fewer lanes, or an older one."""


def device_gpu(device: jax.Device, dispatch: Dispatch | None = None) -> Gpu:
    """Return a device's GPU: its own memory, its host's dispatch and link, and rates from the table or measured.

    Args:
        device: that is asked for its memory.
        dispatch: of the host, whose link is taken to be the table's; None measures both, once in a process.

    Raises:
        ValueError: the device does not report its memory.
    """
    stats = device.memory_stats()
    if not stats:
        raise ValueError(f"{device.device_kind} has no memory of its own to plan for: name a remat policy, not auto")
    known = lookup_gpu(device.device_kind)
    gpu = known or measure_gpu(device)
    if known and dispatch is None and (link := host_link()) < _SLOW_LINK * known.link:
        gpu = replace(known, link=link)
    return replace(gpu, memory=stats["bytes_limit"], dispatch=dispatch or host_dispatch())


@cache
def host_dispatch() -> Dispatch:
    """Return this process's rates of dispatch to its devices, measured once."""
    return measure_dispatch(*jax.local_devices())


@cache
def host_link() -> float:
    """Return the rate at which pinned memory reaches each of this process's devices, bytes/s, measured once."""
    return measure_link(*jax.local_devices())


def measure_gpu(device: jax.Device, *, size: int = _SIZE) -> Gpu:
    """Time a bf16 matmul, a copy on the device and one from pinned host memory: under a second, under 2 GiB.

    Args:
        device: to measure; nothing else should run on it.
        size: rows and columns of the matrices.
    """
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.device_put(jax.random.normal(key, (size, size), jnp.bfloat16), device) for key in keys)
    block = jax.device_put(jnp.zeros(min(_BYTES, 4 * size * size) // 4), device)
    matmul = _seconds(jax.jit(jnp.dot), a, b)
    copy = _seconds(jax.jit(lambda x: x + 1), block)
    link = measure_link(device)
    return Gpu(
        name=device.device_kind,
        capability=compute_capability(device) or (0, 0),
        memory=(device.memory_stats() or {"bytes_limit": 0})["bytes_limit"],
        matmul=fitted.SUSTAINED * 2 * size**3 / matmul,
        copy=2 * block.nbytes / copy,
        link=link,
        peers=link,  # not measured: assume copies through the host
    )


def measure_link(*devices: jax.Device) -> float:
    """Return the rate of copies from pinned host memory to each of some idle devices at the same time, bytes/s."""
    parts = _on(devices, PartitionSpec("devices"))
    host = transfer.to_host(jax.device_put(jnp.zeros(len(devices) * _LINK_BYTES // 4), parts))
    return _LINK_BYTES / _seconds(transfer.to_device, host)


def _on(devices: Sequence[jax.Device], spec: PartitionSpec) -> jax.Device | NamedSharding:
    """Return a place for arrays on all of the devices."""
    return devices[0] if len(devices) == 1 else NamedSharding(Mesh(np.array(devices), ("devices",)), spec)


def measure_files() -> float:
    """Return the rate at which mapped files in the page cache reach the device, bytes/s.

    Pages of this process stand for those of files; reading from a disk takes longer.
    """
    block = np.ones(_BYTES // transfer.FILE_READERS, np.uint8)
    parameter = FileParam(shape=block.shape, dtype=block.dtype, nbytes=block.nbytes, read=lambda: block)
    parameters = [parameter] * transfer.FILE_READERS
    return _BYTES / _seconds(transfer.to_device, parameters)


def _seconds(function: Callable, *arguments: Any) -> float:
    """Return the time of a call, several back to back; the least over rounds, for idle GPUs begin slowly."""
    jax.block_until_ready(function(*arguments))
    rounds = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(_CALLS)])
        rounds.append((time.perf_counter() - begun) / _CALLS)
    return min(rounds)


_MANY, _RETURNED = 257, 4
"""Arrays of a program that takes many, of which every fourth is returned, as a layer returns its gradients."""
_COPIED = 17
"""Arrays of a copy of many."""
_DISPATCHES, _DISPATCH_ROUNDS = 8, 25


def measure_dispatch(*devices: jax.Device, clock: Callable[[], float] = time.perf_counter) -> Dispatch:
    """Time calls of small programs, and copies to the host, on idle devices that share each, in about 0.5 s.

    Args:
        devices: with pinned host memory, or CPUs, whose copies stay on them.
        clock: seconds.
    """
    program = jax.jit(_increase, keep_unused=True)
    few, many = (_dispatch_seconds(program, _arrays(count, devices), clock) for count in (1, _MANY))
    kinds = {memory.kind for memory in devices[0].addressable_memories()}
    copy = transfer.to_host if transfer.PINNED in kinds else _put
    one, several = (_dispatch_seconds(copy, _arrays(count, devices), clock) for count in (1, _COPIED))
    taken = (_MANY - 1) * (1 + 1 / _RETURNED)
    return Dispatch(
        call=few,
        array=max(many - few, 0.0) / taken,
        copy=max(several - one, 0.0) / (_COPIED - 1),
    )


def _increase(arrays: list[Array]) -> list[Array]:
    return [array + 1 for array in arrays[::_RETURNED]]


def _arrays(count: int, devices: Sequence[jax.Device]) -> list[Array]:
    whole = _on(devices, PartitionSpec())
    return [jax.device_put(jnp.zeros(16), whole) for _ in range(count)]


def _put(arrays: list[Array]) -> list[Array]:
    return jax.device_put(arrays, arrays[0].sharding)


def _dispatch_seconds(
    function: Callable[[list[Array]], list[Array]], arrays: list[Array], clock: Callable[[], float]
) -> float:
    """Return the host's time of a call, the least over rounds of some: other programs only lengthen them."""
    jax.block_until_ready(function(arrays))
    rounds = []
    for _ in range(_DISPATCH_ROUNDS):
        begun = clock()
        results = [function(arrays) for _ in range(_DISPATCHES)]
        rounds.append((clock() - begun) / _DISPATCHES)
        jax.block_until_ready(results)
    return min(rounds)
