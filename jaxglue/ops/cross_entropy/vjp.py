"""Loss and gradients of the output projection chunk by chunk, all formed in the forward pass."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops.cross_entropy.chunks import ChunkSpec, split_chunks
from jaxglue.ops.cross_entropy.reference import token_losses


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_cross_entropy(
    spec: ChunkSpec,
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    loss_weights: Float[Array, " M"],
) -> Float[Array, ""]:
    """See `linear_cross_entropy`."""
    return _scan_chunks(spec, x, weight, targets, loss_weights, x_needs_grad=False, weight_needs_grad=False)[0]


def _scan_chunks(
    spec: ChunkSpec, x, weight, targets, loss_weights, *, x_needs_grad: bool, weight_needs_grad: bool
) -> tuple[Array, Array | None, Array | None]:
    """Return (loss, dx, dweight); a gradient that is not needed is None."""
    M, D = x.shape
    chunks = split_chunks(spec.chunk, x, targets, loss_weights)
    w = weight.astype(x.dtype)

    def step(carry, inputs):
        loss, dweight = carry
        x_chunk, target, token_weight = inputs
        logits = lax.dot_general(x_chunk, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if not (x_needs_grad or weight_needs_grad):
            return (loss + jnp.sum(token_weight * token_losses(logits, target)[0]), dweight), None
        losses, dlogits = spec.cross_entropy(logits, target, token_weight, x.dtype)
        loss += jnp.sum(losses)
        if weight_needs_grad:
            dweight += lax.dot_general(dlogits, x_chunk, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (loss, dweight), dlogits @ w if x_needs_grad else None

    dweight = jnp.zeros(weight.shape, jnp.float32) if weight_needs_grad else None
    (loss, dweight), dx = lax.scan(step, (jnp.float32(0), dweight), chunks)
    dx = dx.reshape(-1, D)[:M] if x_needs_grad else None
    return loss, dx, dweight


def _forward(spec, x, weight, targets, loss_weights):
    needs_grad = {"x_needs_grad": x.perturbed, "weight_needs_grad": weight.perturbed}
    arguments = (x.value, weight.value, targets.value, loss_weights.value)
    loss, dx, dweight = _scan_chunks(spec, *arguments, **needs_grad)
    dweight = None if dweight is None else dweight.astype(weight.value.dtype)
    return loss, (dx, dweight)


def _backward(_, residuals, dloss):
    if isinstance(dloss, SymbolicZero):
        return None, None, None, None
    dx, dweight = (None if g is None else (g * dloss).astype(g.dtype) for g in residuals)
    return dx, dweight, None, None


chunked_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
