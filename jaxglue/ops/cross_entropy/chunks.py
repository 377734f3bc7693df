"""Chunks of tokens whose logits exist at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

CrossEntropy = Callable[..., tuple[Float[Array, " M"], Float[Array, "M V"]]]
"""(float32 logits [M, V], targets, weights, dtype) → each token's loss and the gradient to the logits in `dtype`."""


@dataclass(frozen=True, kw_only=True)
class ChunkSpec:
    """Static, hashable arguments of `chunked_cross_entropy`."""

    cross_entropy: CrossEntropy
    chunk: int
    """Tokens whose logits exist at a time."""


def split_chunks(chunk: int, *arrays: Array) -> list[Array]:
    """Split arrays of M rows into [M / chunk, chunk, …], padded with zeros."""
    chunk = min(chunk, len(arrays[0]))
    padding = -len(arrays[0]) % chunk
    padded = (jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)) for array in arrays)
    return [array.reshape(-1, chunk, *array.shape[1:]) for array in padded]
