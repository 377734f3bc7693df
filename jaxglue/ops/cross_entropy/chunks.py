"""Chunks of tokens whose logits exist at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

CrossEntropy = Callable[..., tuple[Float[Array, " M"], Float[Array, "M V"]]]
"""(float32 logits [M, V], targets, weights, dtype) → each token's loss and the gradient to the logits in `dtype`."""

SoftmaxGradient = Callable[..., tuple[Float[Array, " M"], Float[Array, "M V"], Float[Array, " M"]]]
"""The same as each token's loss, numerators [M, V] in `dtype`, and the float32 factors that make them the gradient."""


@dataclass(frozen=True, kw_only=True)
class ChunkSpec:
    """Static, hashable arguments of `chunked_cross_entropy`."""

    cross_entropy: CrossEntropy
    chunk: int
    """Tokens whose logits exist at a time."""
    softmax_gradient: SoftmaxGradient | None = None

    def loss_and_input_gradient(
        self, logits: Float[Array, "M V"], targets, weights, w: Float[Array, "V D"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M D"]]:
        """Return each token's loss and gradient to the hidden states, in w's dtype, of logits = hidden·wᵀ."""
        if self.softmax_gradient is None:
            losses, dlogits = self.cross_entropy(logits, targets, weights, w.dtype)
            return losses, dlogits @ w
        losses, numerators, factors = self.softmax_gradient(logits, targets, weights, w.dtype)
        products = jnp.matmul(numerators, w, preferred_element_type=jnp.float32)
        return losses, (products * factors[:, None]).astype(w.dtype)


def split_chunks(chunk: int, *arrays: Array) -> list[Array]:
    """Split arrays of M rows into [M / chunk, chunk, …], padded with zeros."""
    chunk = min(chunk, len(arrays[0]))
    padding = -len(arrays[0]) % chunk
    padded = (jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)) for array in arrays)
    return [array.reshape(-1, chunk, *array.shape[1:]) for array in padded]
