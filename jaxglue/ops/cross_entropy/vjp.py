"""Loss and gradients of the output projection chunk by chunk, all formed in the forward pass."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops.cross_entropy.chunks import ChunkSpec, extend, split_chunks, times_transposed
from jaxglue.ops.cross_entropy.reference import token_losses

Rows = tuple[Float[Array, "n D"], Int[Array, " n"]]
"""Values in place of rows of the output projection, and these rows' distinct indices."""


class Needs(NamedTuple):
    """Arguments that need gradients."""

    x: bool = False
    weight: bool = False
    rows: bool = False
    columns: bool = False


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_cross_entropy(
    spec: ChunkSpec,
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    loss_weights: Float[Array, " M"],
    rows: Rows | None = None,
    columns: Float[Array, "V R"] | None = None,
) -> Float[Array, ""]:
    """See `linear_cross_entropy`."""
    return _scan_chunks(spec, x, weight, targets, loss_weights, rows, columns, needs=Needs())[0]


def _scan_chunks(
    spec: ChunkSpec, x, weight, targets, loss_weights, rows: Rows | None, columns: Array | None, *, needs: Needs
) -> tuple[Array, Array | None, Array | None, Array | None, Array | None]:
    """Return (loss, dx, dweight, drows, dcolumns); a gradient that is not needed is None."""
    D = weight.shape[1]
    chunks = split_chunks(spec.chunk, x, targets, loss_weights)
    w = extend(weight, columns, x.dtype)
    values, indices = (None, None) if rows is None else (rows[0].astype(x.dtype), rows[1])

    def step(carry, inputs):
        loss, dweight, drows, dcolumns = carry
        x_chunk, target, token_weight = inputs
        if needs == Needs(x=True) and values is None:
            losses, alone = spec.loss_and_input_gradient(x_chunk, w, target, token_weight)
            return (loss + jnp.sum(losses), dweight, drows, dcolumns), alone
        logits = times_transposed(x_chunk, w)
        if values is not None:
            logits = logits.at[:, indices].set(times_transposed(x_chunk, values))
        if not any(needs):
            return (
                loss + jnp.sum(token_weight * token_losses(spec.cap(logits), target)[0]),
                dweight,
                drows,
                dcolumns,
            ), None
        losses, dlogits = spec.cross_entropy(logits, target, token_weight, x.dtype)
        loss += jnp.sum(losses)
        dx = None
        if values is not None:
            replaced = dlogits[:, indices]
            dlogits = dlogits.at[:, indices].set(0)
            drows = drows + _transposed_times(replaced, x_chunk) if needs.rows else None
            dx = replaced @ values if needs.x else None
        if needs.weight:
            dweight += _transposed_times(dlogits, x_chunk[:, :D])
        if needs.columns:
            dcolumns += _transposed_times(dlogits, x_chunk[:, D:])
        if needs.x:
            dx = dlogits @ w if dx is None else dlogits @ w + dx
        return (loss, dweight, drows, dcolumns), dx

    dweight = jnp.zeros((len(w), D), jnp.float32) if needs.weight else None
    drows = jnp.zeros(values.shape, jnp.float32) if needs.rows and values is not None else None
    dcolumns = jnp.zeros((len(w), columns.shape[1]), jnp.float32) if needs.columns and columns is not None else None
    (loss, dweight, drows, dcolumns), dx = lax.scan(step, (jnp.float32(0), dweight, drows, dcolumns), chunks)
    dx = dx.reshape(-1, x.shape[1])[: len(x)] if needs.x else None
    dweight, dcolumns = (None if g is None else g[: len(weight)] for g in (dweight, dcolumns))
    return loss, dx, dweight, drows, dcolumns


def _transposed_times(dlogits, x) -> Array:
    return lax.dot_general(dlogits, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _forward(spec, x, weight, targets, loss_weights, rows, columns):
    needs = Needs(
        x.perturbed,
        weight.perturbed,
        rows is not None and rows[0].perturbed,
        columns is not None and columns.perturbed,
    )
    values = None if rows is None else (rows[0].value, rows[1].value)
    further = None if columns is None else columns.value
    arguments = (x.value, weight.value, targets.value, loss_weights.value, values, further)
    loss, dx, dweight, drows, dcolumns = _scan_chunks(spec, *arguments, needs=needs)
    dweight = None if dweight is None else dweight.astype(weight.value.dtype)
    drows = None if drows is None else drows.astype(rows[0].value.dtype)
    dcolumns = None if dcolumns is None else dcolumns.astype(columns.value.dtype)
    return loss, (dx, dweight, drows, dcolumns)


def _backward(_, residuals, dloss):
    if isinstance(dloss, SymbolicZero):
        return None, None, None, None, None, None
    dx, dweight, drows, dcolumns = (None if g is None else (g * dloss).astype(g.dtype) for g in residuals)
    return dx, dweight, None, None, None if drows is None else (drows, None), dcolumns


chunked_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
