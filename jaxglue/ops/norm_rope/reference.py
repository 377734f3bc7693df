"""Norms and rotation by XLA, in float32: the definitions."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.quant.fp8 import quantize_rows
from jaxglue.ops.rope import apply_rope


class NormStyle(NamedTuple):
    """Offset of an RMS norm's weight, and the place of its rounding."""

    offset: float = 0.0
    """Added to the weight: 1 in families that store weights around 0."""
    rounds_first: bool = True
    """Normalized values are rounded to x's dtype before the weight's product, not the float32 product after it."""


LLAMA_NORM = NormStyle()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """RMS norms over the head dim, of queries and of keys."""

    q_weight: Float[Array, " H"]
    k_weight: Float[Array, " H"]
    eps: float = field(metadata={"static": True})
    style: NormStyle = field(default=LLAMA_NORM, metadata={"static": True})

    @property
    def weights(self) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
        """Return the weights of queries and of keys."""
        return self.q_weight, self.k_weight

    def __call__(
        self, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Norm queries and keys."""
        return rms_norm(q, self.q_weight, self.eps, self.style), rms_norm(k, self.k_weight, self.eps, self.style)


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float, style: NormStyle = LLAMA_NORM
) -> Float[Array, "*B D"]:
    """Divide x by its root mean square and multiply by the weight, by default as transformers' `LlamaRMSNorm`.

    Args:
        x: computed in float32, returned in its dtype.
        weight: of the last axis.
        eps: added to the mean square.
        style: addend of the weight, and where values are rounded.
    """
    normed = x.astype(jnp.float32) * inverse_rms(x, eps)
    if style == LLAMA_NORM:
        return normed.astype(x.dtype) * weight.astype(x.dtype)
    weight = style.offset + weight.astype(jnp.float32)
    return (normed.astype(x.dtype) * weight if style.rounds_first else normed * weight).astype(x.dtype)


def inverse_rms(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B 1"]:
    """Compute 1 / x's root mean square, in float32."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + eps)


@dataclass(frozen=True)
class ReferenceNorm:
    """`NormBackend` by XLA."""

    def norm(self, x, weight, stream=None, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        normed = rms_norm(x, weight, eps, style)
        return normed if stream is None else stream + normed

    def fp8_norm(self, x, weight, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        return *quantize_rows(rms_norm(x, weight, eps, style)), inverse_rms(x, eps)

    def norm_gradient(self, x, weight, dstream, dout, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        (dx,) = jax.vjp(lambda x: rms_norm(x, weight, eps, style), x)[1](dout)
        return dx if dstream is None else dstream + dx


def reference_rotate(q, k, cos, sin, norms: HeadNorms | None, *, interleaved: bool = False) -> tuple[Array, Array]:
    """Norm q and k if there are norms, then rotate."""
    if norms is not None:
        q, k = norms(q, k)
    return apply_rope(q, cos, sin, interleaved=interleaved), apply_rope(k, cos, sin, interleaved=interleaved)
