"""Loss and gradients of the output projection chunk by chunk, all formed in the forward pass."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops.cross_entropy.chunks import ChunkSpec, split_chunks, times_transposed
from jaxglue.ops.cross_entropy.reference import cap_logits, token_losses

Rows = tuple[Float[Array, "n D"], Int[Array, " n"]]
"""Values in place of rows of the output projection, and these rows' distinct indices."""


class Needs(NamedTuple):
    """Arguments that need gradients."""

    x: bool = False
    weight: bool = False
    rows: bool = False


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_cross_entropy(
    spec: ChunkSpec,
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    loss_weights: Float[Array, " M"],
    rows: Rows | None = None,
) -> Float[Array, ""]:
    """See `linear_cross_entropy`."""
    return _scan_chunks(spec, x, weight, targets, loss_weights, rows, needs=Needs())[0]


def _scan_chunks(
    spec: ChunkSpec, x, weight, targets, loss_weights, rows: Rows | None, *, needs: Needs
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Return (loss, dx, dweight, drows); a gradient that is not needed is None."""
    M, D = x.shape
    chunks = split_chunks(spec.chunk, x, targets, loss_weights)
    w = weight.astype(x.dtype)
    values, indices = (None, None) if rows is None else (rows[0].astype(x.dtype), rows[1])

    def step(carry, inputs):
        loss, dweight, drows = carry
        x_chunk, target, token_weight = inputs
        if needs == Needs(x=True) and values is None:
            losses, alone = spec.loss_and_input_gradient(x_chunk, w, target, token_weight)
            return (loss + jnp.sum(losses), dweight, drows), alone
        logits = times_transposed(x_chunk, w)
        if values is not None:
            logits = logits.at[:, indices].set(times_transposed(x_chunk, values))
        if not any(needs):
            return (
                loss + jnp.sum(token_weight * token_losses(cap_logits(logits, spec.softcap), target)[0]),
                dweight,
                drows,
            ), None
        losses, dlogits = spec.cross_entropy(logits, target, token_weight, x.dtype)
        loss += jnp.sum(losses)
        dx = None
        if values is not None:
            columns = dlogits[:, indices]
            dlogits = dlogits.at[:, indices].set(0)
            drows = drows + _transposed_times(columns, x_chunk) if needs.rows else None
            dx = columns @ values if needs.x else None
        if needs.weight:
            dweight += _transposed_times(dlogits, x_chunk)
        if needs.x:
            dx = dlogits @ w if dx is None else dlogits @ w + dx
        return (loss, dweight, drows), dx

    dweight = jnp.zeros(weight.shape, jnp.float32) if needs.weight else None
    drows = jnp.zeros(values.shape, jnp.float32) if needs.rows and values is not None else None
    (loss, dweight, drows), dx = lax.scan(step, (jnp.float32(0), dweight, drows), chunks)
    dx = dx.reshape(-1, D)[:M] if needs.x else None
    return loss, dx, dweight, drows


def _transposed_times(dlogits, x) -> Array:
    return lax.dot_general(dlogits, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _forward(spec, x, weight, targets, loss_weights, rows):
    needs = Needs(x.perturbed, weight.perturbed, rows is not None and rows[0].perturbed)
    values = None if rows is None else (rows[0].value, rows[1].value)
    arguments = (x.value, weight.value, targets.value, loss_weights.value, values)
    loss, dx, dweight, drows = _scan_chunks(spec, *arguments, needs=needs)
    dweight = None if dweight is None else dweight.astype(weight.value.dtype)
    drows = None if drows is None else drows.astype(rows[0].value.dtype)
    return loss, (dx, dweight, drows)


def _backward(_, residuals, dloss):
    if isinstance(dloss, SymbolicZero):
        return None, None, None, None, None
    dx, dweight, drows = (None if g is None else (g * dloss).astype(g.dtype) for g in residuals)
    return dx, dweight, None, None, None if drows is None else (drows, None)


chunked_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
