"""Chunks of tokens whose logits exist at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.cross_entropy.reference import cap_logits
from jaxglue.ops.projection.ordered import ordered_product

CrossEntropy = Callable[..., tuple[Float[Array, " M"], Float[Array, "M V"]]]
"""(float32 logits [M, V], targets, weights, dtype) → each token's loss and the gradient to the logits in `dtype`.

Logits beyond the vocabulary do not count, and their gradient is 0.
"""

SoftmaxGradient = Callable[..., tuple[Float[Array, " M"], Float[Array, "M V"], Float[Array, " M"]]]
"""The same as each token's loss, numerators [M, V] in `dtype`, and the float32 factors that make them the gradient."""
ProductGradient = Callable[..., tuple[Float[Array, " M"], Float[Array, "M D"]]]
"""(hidden states [M, D], output projection [V, D], targets, weights) → each token's loss and float32 gradient."""

_TILE = 128
"""Rows of a matmul's tile."""
_ALIGNED = 16
"""Bytes at whose multiples a matmul's rows begin."""


@dataclass(frozen=True, kw_only=True)
class ChunkSpec:
    """Static, hashable arguments of `chunked_cross_entropy`."""

    cross_entropy: CrossEntropy
    vocab_size: int
    """Rows of the output projection without those that `extend` adds."""
    chunk: int
    """Most tokens whose logits exist at a time."""
    softmax_gradient: SoftmaxGradient | None = None
    product_gradient: ProductGradient | None = None
    softcap: float | None = None
    """Bound of the logits, to which `cross_entropy` takes the gradient back."""
    temperature: float = 1.0
    """Divides them, and the gradient."""
    exact: bool = False
    """Sums have one order, with and without gradients."""

    def loss_and_input_gradient(
        self, x: Float[Array, "M D"], w: Float[Array, "V D"], targets, weights
    ) -> tuple[Float[Array, " M"], Float[Array, "M D"]]:
        """Return each token's loss and gradient to x, in its dtype, of logits x·wᵀ."""
        if self.product_gradient is not None:
            losses, dx = self.product_gradient(x, w, targets, weights)
            return losses, dx.astype(x.dtype)
        logits = self.multiply(x, w)
        if self.softmax_gradient is None:
            losses, dlogits = self.cross_entropy(logits, targets, weights, x.dtype)
            return losses, dlogits @ w
        losses, numerators, factors = self.softmax_gradient(logits, targets, weights, x.dtype)
        products = jnp.matmul(numerators, w, preferred_element_type=jnp.float32)
        return losses, (products * factors[:, None]).astype(x.dtype)

    def losses_of(
        self, x: Float[Array, "M D"], w: Float[Array, "V D"], logits: Float[Array, "M V"], targets, weights
    ) -> Float[Array, " M"]:
        """Return the losses of `loss_and_input_gradient`, whose logits are known, and without its gradient."""
        if self.product_gradient is not None:
            return self.product_gradient(x, w, targets, weights)[0]
        of_logits = self.softmax_gradient or self.cross_entropy
        return of_logits(logits, targets, weights, x.dtype)[0]

    def capped_logits(self, x: Float[Array, "M D"], w: Float[Array, "V D"]) -> Float[Array, "M V"]:
        """Return the logits x·wᵀ of losses, within their bound and over the temperature."""
        return self.cap(self.multiply(x, w))

    def multiply(self, x: Float[Array, "M D"], w: Float[Array, "V D"]) -> Float[Array, "M V"]:
        """Return x·wᵀ in float32."""
        return ordered_product(x, w, jnp.float32) if self.exact else times_transposed(x, w)

    def cap(self, logits: Float[Array, "M rows"]) -> Float[Array, "M V"]:
        """Return a vocabulary's logits, the first ones, within their bound and over the temperature."""
        return cap_logits(logits[:, : self.vocab_size], self.softcap, self.temperature)


def extend(weight: Float[Array, "V D"], columns: Float[Array, "V R"] | None, dtype) -> Float[Array, "rows W"]:
    """Return a matrix in `dtype`, with further columns if there are any, and `with_whole_rows`."""
    w = weight.astype(dtype)
    w = w if columns is None else jnp.concatenate([w, columns.astype(dtype)], axis=1)
    return with_whole_rows(w, w.dtype.itemsize)


def with_whole_rows(w: Float[Array, "V W"], itemsize: int) -> Float[Array, "rows W"]:
    """Return a matrix with rows of zeros up to a number whose logits' gradients, of so many bytes, are aligned.

    Without them XLA pads matmuls' factors and cuts their results in every chunk.
    """
    missing = -len(w) % (_ALIGNED // itemsize)
    return jnp.pad(w, ((0, missing), (0, 0))) if missing else w


def times_transposed(x: Float[Array, "M D"], w: Float[Array, "V D"]) -> Float[Array, "M V"]:
    """Return x·wᵀ in float32."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def split_chunks(chunk: int, *arrays: Array) -> list[Array]:
    """Split arrays of M rows into equal parts of at most `chunk` rows, [parts, rows, …], padded with zeros."""
    parts = -(-len(arrays[0]) // chunk)
    rows = -(-len(arrays[0]) // parts)
    chunk = min(chunk, -(-rows // _TILE) * _TILE) if parts > 1 else rows
    padding = -len(arrays[0]) % chunk
    padded = (jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)) for array in arrays)
    return [array.reshape(-1, chunk, *array.shape[1:]) for array in padded]
