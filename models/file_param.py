"""Parameters that stay in their files, or in the host's memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True, eq=False)
class FileParam:
    """Parameter in memory-mapped files, read anew for each use; a leaf of parameter trees."""

    shape: tuple[int, ...]
    """Shape of the parameter before quantization."""
    dtype: Any
    nbytes: int
    """Bytes in the files."""
    read: Callable[[], Any]
    """Returns a numpy array, a view of the page cache where nothing is converted, or a quantized matrix of such."""


def on_device(weight: Any) -> Any:
    """Return a weight that may be in pinned host memory, or in its file, in the device's."""

    def move(leaf):
        if isinstance(leaf, FileParam):
            return jax.device_put(leaf.read())
        concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if concrete and leaf.sharding.memory_kind == "pinned_host":
            return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        return leaf

    return jax.tree.map(move, weight)
