"""Digests and finiteness of arrays, computed where the arrays are, in one pass over each."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from jaxglue.engine.transfer import to_device
from jaxglue.models.parameters import Params

_GOLDEN = (0x9E3779B9, 0xC2B2AE35)
_SEEDS = (0x85EBCA6B, 0x27D4EB2F)


class ArrayCheck(NamedTuple):
    """Facts about an array."""

    digest: str
    """16 hexadecimal digits of its bits and their places: any change of a single element changes them, any other but
    one in 2⁶⁴. Independent of sharding."""
    is_finite: bool


def check_arrays(tree: PyTree[Array]) -> dict[str, ArrayCheck]:
    """Return the checks of all arrays of a tree by name; on several processes all must call."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    checks = jax.device_get([_check_in_turn(leaf) for _, leaf in leaves])
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _read(row)
        for (path, _), row in zip(leaves, checks, strict=True)
    }


def check_parameters(tree: Params) -> Iterator[tuple[str, ArrayCheck]]:
    """Yield name and check of every array of a parameter tree; parts on the host are copied to the device in turn."""
    parts = [("", {name: part for name, part in tree.items() if name != "layers"})]
    parts += [(f"layers.{index}.", layer) for index, layer in enumerate(tree["layers"])]
    for prefix, part in parts:
        arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, part)
        yield from ((prefix + name, check) for name, check in check_arrays(to_device(arrays)).items())


def non_finite(tree: PyTree[Any]) -> list[str]:
    """Return the names of the arrays with infinite or NaN elements."""
    return [name for name, check in check_arrays(tree).items() if not check.is_finite]


def _check_in_turn(x: Array) -> UInt32[Array, "3"]:
    """Return `_check(x)`; of simulated devices once it is done.

    Sums over such devices in several programs at once can block all of XLA's threads, as each waits for another device.
    """
    row = _check(x)
    simulated = len(x.devices()) > 1 and next(iter(x.devices())).platform == "cpu"
    return row.block_until_ready() if simulated else row


def _read(row: UInt32[np.ndarray, "3"]) -> ArrayCheck:
    return ArrayCheck("".join(f"{int(word):08x}" for word in row[:2]), not row[2])


@jax.jit
def _check(x: Array) -> UInt32[Array, "3"]:
    """Return two sums of mixed words, and the number of elements that are not finite."""
    words = _words(x)
    index = _flat_index(x.shape)
    mixed = [
        _mix(words ^ (index * jnp.uint32(golden) + jnp.uint32(seed)))
        for golden, seed in zip(_GOLDEN, _SEEDS, strict=True)
    ]
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    bad = ~jnp.isfinite(x.astype(jnp.float32)) if is_float else jnp.zeros(x.shape, bool)
    # One reduction of all three, so that no operand of the size of the array is stored.
    zeros = (jnp.uint32(0),) * 3
    return jnp.stack(jax.lax.reduce((*mixed, bad.astype(jnp.uint32)), zeros, _combine, tuple(range(x.ndim))))


def _combine(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return a[0] + b[0], a[1] + b[1], a[2] | b[2]


def _words(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _flat_index(shape: tuple[int, ...]) -> Array:
    """Return each element's index modulo 2³², without a reshape, which would move shards."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def _mix(x: Array) -> Array:
    """Mix the bits of each word by a bijection, MurmurHash3's finalizer (Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
