"""Host time of dispatching programs and copies, measured on the machine that dispatches them."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxglue.engine import transfer
from jaxglue.planner.gpus import Dispatch

_MANY, _RETURNED = 257, 4
"""Arrays of a program that takes many, of which every fourth is returned, as a layer returns its gradients."""
_COPIED = 17
"""Arrays of a copy of many."""
_CALLS, _ROUNDS = 8, 25


def measure_dispatch(device: jax.Device, *, clock: Callable[[], float] = time.perf_counter) -> Dispatch:
    """Time calls of small programs, and copies to the host, on a device on which nothing else runs, in about 0.5 s.

    Args:
        device: with pinned host memory, or a CPU, whose copies stay on it.
        clock: seconds.
    """
    program = jax.jit(_increase, keep_unused=True)
    few, many = (_seconds(program, _arrays(count, device), clock) for count in (1, _MANY))
    kinds = {memory.kind for memory in device.addressable_memories()}
    copy = transfer.to_host if transfer.PINNED in kinds else _put
    one, several = (_seconds(copy, _arrays(count, device), clock) for count in (1, _COPIED))
    taken = (_MANY - 1) * (1 + 1 / _RETURNED)
    return Dispatch(
        call=few,
        array=max(many - few, 0.0) / taken,
        copy=max(several - one, 0.0) / (_COPIED - 1),
    )


def _increase(arrays: list[Array]) -> list[Array]:
    return [array + 1 for array in arrays[::_RETURNED]]


def _arrays(count: int, device: jax.Device) -> list[Array]:
    return [jax.device_put(jnp.zeros(16), device) for _ in range(count)]


def _put(arrays: list[Array]) -> list[Array]:
    return jax.device_put(arrays, arrays[0].sharding)


def _seconds(function: Callable[[list[Array]], list[Array]], arrays: list[Array], clock: Callable[[], float]) -> float:
    """Return the host's time of a call, the least over rounds of some: other programs only lengthen them."""
    jax.block_until_ready(function(arrays))
    rounds = []
    for _ in range(_ROUNDS):
        begun = clock()
        results = [function(arrays) for _ in range(_CALLS)]
        rounds.append((clock() - begun) / _CALLS)
        jax.block_until_ready(results)
    return min(rounds)
