"""Copies between a device and its pinned host memory, ordered by the program that asks for them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

PINNED = "pinned_host"


def default_depth(stream_weights: bool) -> int:
    """How many layers ahead copies from the host are asked for.

    One is double buffering. Copies of both directions share a few queues, so the weights of the next layer may stand
    behind activations that leave for the host only now: streamed weights are asked for one layer earlier.
    """
    return 2 if stream_weights else 1


def weights_depth(depth: int) -> int:
    """How many layers ahead streamed weights are asked for in the forward pass.

    Activations leave at the same time, through the same queues, behind which two layers' weights were seen to wait. The
    further buffers are there: the forward pass ends with them full of what the last layers leave behind.
    """
    return depth + 2 if depth else 0


def is_streamed(layer: int) -> bool:
    """Whether a layer's weights are on the host where weights are: nothing runs before the first one's that hides them.

    They would be waited for in every step.
    """
    return layer > 0


def keep_on_device(layer: int, layers: int, depth: int) -> bool:
    """Whether what a layer leaves behind waits for the backward pass on the device, because that begins with it.

    The buffers are those into which later layers' copies are fetched.
    """
    return layer >= layers - 1 - depth


def check_pinned_memory(device: jax.Device) -> None:
    """Raises ValueError when arrays cannot be kept in pinned memory beside this device."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if PINNED not in kinds:
        raise ValueError(
            f"{device.device_kind} has no pinned host memory in JAX (it has {', '.join(kinds)}): "
            "choose a remat policy without offload, and weights on the device"
        )


def pinned_host(device: jax.Device) -> jax.sharding.Sharding:
    """The pinned memory beside a device; raises ValueError when it has none."""
    check_pinned_memory(device)
    return jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)


def to_host(tree: Any) -> Any:
    """Starts copying a tree's arrays to pinned host memory; sharded arrays keep their sharding."""
    return _move(tree, PINNED)


def to_device(tree: Any) -> Any:
    """Starts copying those of a tree's arrays that are on the host back to the device."""
    return _move(tree, "device")


def _move(tree: Any, kind: str) -> Any:
    """One batch of copies. Named by shardings: `jax.memory.Space` would make each a program of the compute stream."""
    leaves, treedef = jax.tree.flatten(tree)
    moving = [i for i, leaf in enumerate(leaves) if leaf.sharding.memory_kind != kind]
    arrays = [leaves[i] for i in moving]
    shardings = [array.sharding.with_memory_kind(kind) for array in arrays]
    for i, array in zip(moving, jax.device_put(arrays, shardings), strict=True):
        leaves[i] = array
    return jax.tree.unflatten(treedef, leaves)


def commit(tree: Any) -> Any:
    """The tree with every array bound to its devices, without a copy.

    Arrays that have been to the host are bound; were others not, the same program would be compiled once for each.
    """
    return jax.tree.map(lambda a: a if getattr(a, "committed", True) else jax.device_put(a, a.sharding), tree)


def prefetch[Item](fetches: Iterable[Callable[[], Item]], depth: int) -> Iterator[Item]:
    """The results of `fetches` in order, each asked for before the one `depth` places earlier is handed out."""
    asked: deque[Item] = deque()
    for fetch in fetches:
        asked.append(fetch())
        if len(asked) > depth:
            yield asked.popleft()
    while asked:
        yield asked.popleft()


class Turns[Item]:
    """Hands out items in order; holds none but the next, where that is wanted while the one before it is in use."""

    def __init__(self, items: Iterator[Item], *, early: bool):
        self._items, self._early = items, early
        self.following: Item | None = next(items, None) if early else None
        """The next item, None after the last or where it is not wanted early."""

    def take(self) -> Item:
        """The next item."""
        if not self._early:
            return next(self._items)
        item, self.following = self.following, next(self._items, None)
        assert item is not None
        return item


class RunAhead:
    """Holds the program back so that it asks for device memory only a few layers before the device gets there."""

    def __init__(self, layers: int):
        self._layers = layers
        self._dispatched: deque[Any] = deque()

    def add(self, result: Any) -> None:
        """Notes a dispatched layer by one of its results; waits until at most `layers` are not done."""
        self._dispatched.append(result)
        if len(self._dispatched) > self._layers:
            jax.block_until_ready(self._dispatched.popleft())
