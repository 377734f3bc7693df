"""Norms and rotation by XLA, in float32: the definitions."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import compute_capability
from jaxglue.ops.quant.fp8 import quantize_rows
from jaxglue.ops.rope import apply_rope
from jaxglue.ops.row_sums import row_sums


@dataclass(frozen=True)
class NormStyle:
    """Mathematics of a norm: Llama's root-mean-square norm by default, layer norm where it is centered."""

    offset: float = 0.0
    """Added to the weight: 1 in families that store weights around 0."""
    rounds_first: bool = True
    """Normalized values are rounded to x's dtype before the weight's product, not the float32 result after it."""
    centered: bool = False
    """The mean is subtracted first, so that values are divided by their standard deviation."""
    bias: bool = False
    """A bias follows the weight's product."""


LLAMA_NORM = NormStyle()
LAYER_NORM = NormStyle(rounds_first=False, centered=True, bias=True)
"""`torch.nn.LayerNorm`'s."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """Norms over the head dim, of queries and of keys."""

    q_weight: Float[Array, " H"]
    k_weight: Float[Array, " H"]
    eps: float = field(metadata={"static": True})
    style: NormStyle = field(default=LLAMA_NORM, metadata={"static": True})
    biases: tuple[Float[Array, " H"], Float[Array, " H"]] | None = None
    """Of queries and of keys, where the style has them."""

    @property
    def weights(self) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
        """Return the weights of queries and of keys."""
        return self.q_weight, self.k_weight

    def __call__(
        self, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Norm queries and keys."""
        q_bias, k_bias = self.biases or (None, None)
        return (
            reference_norm(q, self.q_weight, self.eps, self.style, q_bias),
            reference_norm(k, self.k_weight, self.eps, self.style, k_bias),
        )


def style_of(norms: HeadNorms | None) -> NormStyle:
    """Return the style of heads' norms; the default where they have none."""
    return LLAMA_NORM if norms is None else norms.style


def reference_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    eps: float,
    style: NormStyle = LLAMA_NORM,
    bias: Float[Array, " D"] | None = None,
) -> Float[Array, "*B D"]:
    """Norm x over its last axis in a style, by default as transformers' `LlamaRMSNorm`.

    Args:
        x: computed in float32, returned in its dtype.
        weight: of the last axis.
        eps: added to the mean square, or to the variance.
        style: mean, offset and bias, and where values are rounded.
        bias: of the last axis, where the style has one.
    """
    values = _centered(x) if style.centered else x
    normed = values.astype(jnp.float32) * inverse_rms(values, eps)
    if style == LLAMA_NORM:
        return normed.astype(x.dtype) * weight.astype(x.dtype)
    weight = style.offset + weight.astype(jnp.float32)
    normed = normed.astype(x.dtype) * weight if style.rounds_first else normed * weight
    if style.bias:
        assert bias is not None
        normed += bias.astype(jnp.float32)
    return normed.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float, style: NormStyle = LLAMA_NORM
) -> Float[Array, "*B D"]:
    """Divide x by its root mean square and multiply by the weight: `reference_norm` without mean and bias."""
    assert not style.centered and not style.bias
    return reference_norm(x, weight, eps, style)


def _centered(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Return x less its mean, in float32."""
    values = x.astype(jnp.float32)
    return values - _mean(values)


def inverse_rms(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B 1"]:
    """Compute 1 / x's root mean square, in float32."""
    return jax.lax.rsqrt(_mean(jnp.square(x.astype(jnp.float32))) + eps)


def _mean(values: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    """Average the last axis: on a CPU by a product, whose order does not depend on what XLA fuses with it."""
    if compute_capability() is not None:
        return jnp.mean(values, axis=-1, keepdims=True)
    return row_sums(values)[..., None] * (1.0 / values.shape[-1])


@dataclass(frozen=True)
class ReferenceNorm:
    """`NormBackend` by XLA."""

    def norm(self, x, weight, stream=None, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        normed = reference_norm(x, weight, eps, style)
        return normed if stream is None else stream + normed

    def fp8_norm(self, x, weight, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        return *quantize_rows(reference_norm(x, weight, eps, style)), inverse_rms(x, eps)

    def norm_gradient(self, x, weight, dstream, dout, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        (dx,) = jax.vjp(lambda x: reference_norm(x, weight, eps, style), x)[1](dout)
        return dx if dstream is None else dstream + dx


def reference_rotate(q, k, cos, sin, norms: HeadNorms | None, *, interleaved: bool = False) -> tuple[Array, Array]:
    """Norm q and k if there are norms, then rotate."""
    if norms is not None:
        q, k = norms(q, k)
    return apply_rope(q, cos, sin, interleaved=interleaved), apply_rope(k, cos, sin, interleaved=interleaved)
