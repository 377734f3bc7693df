"""Tokens to the rows of their experts, and rows back to tokens: each is the other's transpose."""

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.moe.routing import Routing


class RowBackend(Protocol):
    """Copies and sums of rows."""

    def dispatch(self, x: Float[Array, "M D"], tokens: Int[Array, " S"]) -> Float[Array, "S D"]:
        """x[tokens]."""

    def combine(self, rows: Float[Array, "S D"], inverse: Int[Array, "M k"], weights, expert_ids, bias) -> Array:
        """Σ rows[inverse] (+ weights · bias[expert_ids]) over k, summed in float32: [M, D]."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(backend: RowBackend | None, x: Float[Array, "M D"], routing: Routing) -> Float[Array, "M*k D"]:
    """Copies each token to its rows. JAX's own transpose would be a scatter with atomics. Without a backend, by XLA."""
    if backend is not None:
        return backend.dispatch(x, routing.tokens)
    return x.at[routing.tokens].get(mode="promise_in_bounds")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(
    backend: RowBackend | None,
    rows: Float[Array, "M*k D"],
    weights: Float[Array, "M k"] | None,
    bias: Float[Array, "E D"] | None,
    routing: Routing,
) -> Float[Array, "M D"]:
    """Sums each token's rows in float32; adds its experts' biases by weight, where there are any."""
    if backend is not None:
        return backend.combine(rows, routing.inverse, weights, routing.expert_ids, bias)
    out = rows.at[routing.inverse].get(mode="fill", fill_value=0).astype(jnp.float32).sum(1)
    if weights is not None and bias is not None:
        out += (weights[:, :, None] * bias[routing.expert_ids].astype(jnp.float32)).sum(1)
    return out.astype(rows.dtype)


def _dispatch_backward(backend, routing, dout):
    return combine(backend, dout, None, None, routing), None


def _combine_forward(backend, rows, weights, bias, routing):
    return combine(backend, rows, weights, bias, routing), (weights, bias, routing)


def _combine_backward(backend, residuals, dout):
    weights, bias, routing = residuals
    drows = dispatch(backend, dout, routing)
    if weights is None or bias is None:
        return drows, None, None, None
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    by_expert = product("md,ed->me", dout, bias.astype(dout.dtype))
    dbias = product("me,md->ed", routing.dense_weights.astype(dout.dtype), dout)
    return drows, jnp.take_along_axis(by_expert, routing.expert_ids, axis=1), dbias.astype(bias.dtype), None


dispatch.defvjp(lambda backend, x, routing: (dispatch(backend, x, routing), routing), _dispatch_backward)
combine.defvjp(_combine_forward, _combine_backward)
