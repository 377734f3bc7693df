"""Loss and gradient to the input of a frozen output projection multiplied in FP8, formed chunk by chunk."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops.cross_entropy.chunks import ChunkSpec, split_chunks, with_whole_rows
from jaxglue.ops.cross_entropy.reference import ReferenceCrossEntropy, token_losses
from jaxglue.ops.projection.fp8 import dot, encode, rescale
from jaxglue.ops.quant.fp8 import quantize_rows


class FP8Head(NamedTuple):
    """An output projection for both directions."""

    fp8_values: Float[Array, "V D"]
    transposed: Float[Array, "D V"]
    """cuBLAS multiplies along last axes only; this copy is made once, not in every chunk."""
    scales: Float[Array, " V"]


@dataclass(frozen=True)
class ReferenceScaledCrossEntropy:
    """`ReferenceCrossEntropy` of products in FP8."""

    vocab_size: int

    def __call__(self, products, row_scales, column_scales, targets, weights):
        """Return each token's weighted loss, and e4m3 values and scales of its gradient times `column_scales`.

        The logits are float32 products [M, V] times the scales of rows [M, 1] and columns [V].
        """
        logits = products * row_scales * column_scales
        losses, dlogits = ReferenceCrossEntropy(self.vocab_size)(logits, targets, weights, jnp.float32)
        return losses, *quantize_rows(dlogits * column_scales)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_cross_entropy(
    spec: ChunkSpec,
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    loss_weights: Float[Array, " M"],
) -> Float[Array, ""]:
    """See `linear_cross_entropy`; `spec.cross_entropy` is as `ReferenceScaledCrossEntropy`."""
    return _scan_chunks(spec, x, weight, targets, loss_weights, x_needs_grad=False)[0]


def _quantize_head(weight: Float[Array, "V D"]) -> FP8Head:
    fp8_values, scales = encode(with_whole_rows(weight, 1))
    return FP8Head(fp8_values, lax.optimization_barrier(fp8_values.T), scales[:, 0])


def _scan_chunks(spec, x, weight, targets, loss_weights, *, x_needs_grad: bool) -> tuple[Array, Array | None]:
    """Return (loss, dx); None for a gradient that is not needed."""
    head = _quantize_head(weight)

    def step(loss, inputs):
        rows, target, token_weight = inputs
        fp8_values, scales = encode(rows)
        products = dot(fp8_values, head.fp8_values, 1, jnp.float32)
        if not x_needs_grad:
            losses, _ = token_losses(spec.cap(products * scales * head.scales), target)
            return loss + jnp.sum(token_weight * losses), None
        losses, fp8_gradient, dscales = spec.cross_entropy(products, scales, head.scales, target, token_weight)
        return loss + jnp.sum(losses), rescale(dot(fp8_gradient, head.transposed, 1, x.dtype), dscales)

    loss, dx = lax.scan(step, jnp.float32(0), split_chunks(spec.chunk, x, targets, loss_weights))
    return loss, dx.reshape(-1, x.shape[1])[: len(x)] if x_needs_grad else None


def _forward(spec, x, weight, targets, loss_weights):
    if weight.perturbed:
        raise ValueError("an output projection in FP8 must be frozen: leave out --fp8-head where lm_head trains")
    return _scan_chunks(spec, x.value, weight.value, targets.value, loss_weights.value, x_needs_grad=x.perturbed)


def _backward(_, dx, dloss):
    if isinstance(dloss, SymbolicZero) or dx is None:
        return None, None, None, None
    return (dx * dloss).astype(dx.dtype), None, None, None


fp8_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
