"""Exchange between tokens and the rows of their experts: dispatch and combine, each the transpose of the other."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.moe.routing import Routing


@jax.custom_vjp
def dispatch(x: Float[Array, "M D"], routing: Routing) -> Float[Array, "M*k D"]:
    """Copy each token to its rows. JAX's own transpose would be a scatter with atomics."""
    return x.at[routing.tokens].get(mode="promise_in_bounds")


@jax.custom_vjp
def combine(rows: Float[Array, "M*k D"], routing: Routing) -> Float[Array, "M D"]:
    """Sum each token's rows in float32; an index past the last row adds zero."""
    return rows.at[routing.inverse].get(mode="fill", fill_value=0).astype(jnp.float32).sum(1).astype(rows.dtype)


dispatch.defvjp(lambda x, routing: (dispatch(x, routing), routing), lambda routing, d: (combine(d, routing), None))
combine.defvjp(lambda rows, routing: (combine(rows, routing), routing), lambda routing, d: (dispatch(d, routing), None))


def weighted_bias(weights: Float[Array, "M k"], bias: Float[Array, "E D"], expert_ids) -> Float[Array, "M D"]:
    """Return Σ weights · bias[expert_ids] over k, in float32."""
    return (weights[:, :, None] * bias.astype(jnp.float32)[expert_ids]).sum(1)


def weighted_bias_gradients(
    dout: Float[Array, "M D"], bias: Float[Array, "E D"], routing: Routing
) -> tuple[Float[Array, "E D"], Float[Array, "M k"]]:
    """Compute the gradients of `weighted_bias` to bias and weights, as matmuls."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    by_expert = product("md,ed->me", dout, bias.astype(dout.dtype))
    dbias = product("me,md->ed", routing.dense_weights.astype(dout.dtype), dout)
    return dbias.astype(bias.dtype), jnp.take_along_axis(by_expert, routing.expert_ids, axis=1)
