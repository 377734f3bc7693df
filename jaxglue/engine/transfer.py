"""Copies between a device and host memory, pinned or of mapped files, in the order in which they are requested."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import islice, repeat
from typing import Any

import jax
import numpy as np

from jaxglue.engine.host_buffers import Buffers, HostValue, MeshValue
from jaxglue.models.file_param import FileParam

FILE_READERS = 8
"""Threads that copy parameters from mapped files; one copies a few GB/s."""
PINNED = "pinned_host"
RUN_AHEAD = 2
"""Layers that may be dispatched and unfinished while copies are requested."""

HEAD_AHEAD = 5
"""Last layers of the forward pass under which the head's parameters arrive from the host.

A copy to the device begins once all that was dispatched before it is done, as it may reuse their memory.
"""


def default_prefetch_depth(stream_weights: bool) -> int:
    """Return how many layers ahead copies from the host are requested; 1 is double buffering.

    Streamed weights are requested one layer earlier: copies of both directions share queues, so the next layer's
    weights may wait behind activations on their way out.
    """
    return 2 if stream_weights else 1


def weights_prefetch_depth(depth: int) -> int:
    """Return how many layers ahead streamed weights are requested in the forward pass.

    Two more than in the backward pass, since activations leave through the same queues. Memory suffices: the last
    layers' residuals fill these buffers at the end of the forward pass.
    """
    return depth + 2 if depth else 0


def keep_on_device(layer: int, layers: int, depth: int) -> bool:
    """Return whether a layer's residuals stay on the device: those of the last layers, where the backward pass begins.

    They occupy the buffers into which earlier layers' residuals are prefetched.
    """
    return layer >= layers - 1 - depth


def check_pinned_memory(device: jax.Device) -> None:
    """Raise ValueError when a device has no pinned host memory."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if PINNED not in kinds:
        raise ValueError(
            f"{device.device_kind} has no pinned host memory in JAX (it has {', '.join(kinds)}): "
            "choose a remat policy without offload, and weights on the device"
        )


def pinned_host(device: jax.Device) -> jax.sharding.Sharding:
    """Return the sharding of a device's pinned host memory; raise ValueError when it has none."""
    check_pinned_memory(device)
    return jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)


def is_on_host(tree: Any) -> bool:
    """Return whether a tree's arrays are in host memory or in files, judged by the first; none inside a program is."""
    first = [leaf for leaf in jax.tree.leaves(tree)[:1] if not isinstance(leaf, jax.core.Tracer)]
    return any(isinstance(leaf, FileParam | np.ndarray) or leaf.sharding.memory_kind == PINNED for leaf in first)


def to_host(tree: Any, buffers: Buffers | None = None) -> Any:
    """Start copying a tree's arrays to pinned host memory, keeping their shardings: JAX's, or that of buffers."""
    if buffers is None:
        return _move(tree, PINNED)
    return jax.tree.map(lambda array: buffers.store(array, array.sharding.with_memory_kind(PINNED)), tree)


def to_device(tree: Any) -> Any:
    """Start copying a tree's arrays that are on the host back to the device; wait until files are read."""
    return received(request(tree))


def request(tree: Any) -> Any:
    """Start copying as `to_device` does, without waiting: parameters in files are futures, until `received`."""
    leaves, treedef = jax.tree.flatten(tree)
    if not any(isinstance(leaf, FileParam) for leaf in leaves):
        return _move(tree, "device")
    others = iter(_move([leaf for leaf in leaves if not isinstance(leaf, FileParam)], "device"))
    moved = [_readers().submit(_put, leaf) if isinstance(leaf, FileParam) else next(others) for leaf in leaves]
    return jax.tree.unflatten(treedef, moved)


def received(tree: Any) -> Any:
    """Return a requested tree, once its parameters in files are read."""
    return jax.tree.map(lambda leaf: leaf.result() if isinstance(leaf, Future) else leaf, tree)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(FILE_READERS, thread_name_prefix="file-reader")


def _put(parameter: FileParam) -> Any:
    return jax.device_put(parameter.read(), jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))


def _move(tree: Any, kind: str) -> Any:
    """Copy in one batch. Shardings, not `jax.memory.Space`: that would run each copy on the compute stream."""
    leaves, treedef = jax.tree.flatten(tree)
    moving = [i for i, leaf in enumerate(leaves) if leaf.sharding.memory_kind != kind]
    if not moving:
        return tree
    parts = [leaf.parts if isinstance(leaf, MeshValue) else [leaf] for leaf in (leaves[i] for i in moving)]
    every = [part for each in parts for part in each]
    shardings = [part.sharding.with_memory_kind(kind) for part in every]
    contents = [part.content if isinstance(part, HostValue) else part for part in every]
    arrived = iter(jax.device_put(contents, shardings))
    for i, each in zip(moving, parts, strict=True):
        leaves[i] = _joined(leaves[i], kind, [next(arrived) for _ in each])
    return jax.tree.unflatten(treedef, leaves)


def _joined(value: Any, kind: str, parts: list[jax.Array]) -> jax.Array:
    """Return the array whose parts have arrived on their devices."""
    if not isinstance(value, MeshValue):
        return parts[0]
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding.with_memory_kind(kind), parts)


def commit(tree: Any) -> Any:
    """Commit every array to its devices, without a copy.

    Arrays that return from the host are committed; mixing both kinds would compile programs twice.
    """
    if all(getattr(array, "committed", True) for array in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda a: a if getattr(a, "committed", True) else jax.device_put(a, a.sharding), tree)


def prefetch[Item](
    fetches: Iterable[Callable[[], Item]], depth: int, moving: Iterable[bool] | None = None
) -> Iterator[Item]:
    """Yield the results of `fetches` in order, calling each ahead of its turn.

    Args:
        fetches: of one item each.
        depth: items, of those that move, requested beyond the one yielded.
        moving: whether each fetch copies anything; all do by default.
    """
    requested: deque[tuple[Item, bool]] = deque()
    for fetch, moves in zip(fetches, repeat(True) if moving is None else moving, strict=False):
        while requested and moves + sum(later for _, later in islice(requested, 1, None)) > depth:
            yield requested.popleft()[0]
        requested.append((fetch(), moves))
    while requested:
        yield requested.popleft()[0]


@lru_cache(maxsize=1024)
def requested_ahead(moving: tuple[bool, ...], depth: int) -> tuple[int, ...]:
    """Return for each item that `prefetch` yields the number of items requested until then."""
    ends, end, later = [], 1, 0
    for index in range(len(moving)):
        if index and index < end:
            later -= moving[index]
        end = max(end, index + 1)
        while end < len(moving) and later + moving[end] <= depth:
            later += moving[end]
            end += 1
        ends.append(end)
    return tuple(ends)


class Lookahead[Item]:
    """Take items in order, with the next one visible early if `early`; hold no other."""

    def __init__(self, items: Iterator[Item], *, early: bool):
        self._items, self._early = items, early
        self.following: Item | None = next(items, None) if early else None
        """The next item; None after the last, and without `early`."""

    def take(self) -> Item:
        """Return the next item."""
        if not self._early:
            return next(self._items)
        item, self.following = self.following, next(self._items, None)
        assert item is not None
        return item


class RunAhead:
    """Limit dispatched and unfinished layers, so that device memory is requested shortly before its use."""

    def __init__(self, layers: int):
        self._layers = layers
        self._dispatched: deque[Any] = deque()

    def add(self, result: Any) -> None:
        """Add a dispatched layer by one of its results; wait until at most `layers` are unfinished."""
        self._dispatched.append(result)
        if len(self._dispatched) > self._layers:
            jax.block_until_ready(self._dispatched.popleft())
