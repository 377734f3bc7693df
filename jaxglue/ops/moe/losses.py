"""Auxiliary losses of a router, and statistics of its load."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxglue.ops.collectives import psum_batch
from jaxglue.ops.moe.routing import Routing


def auxiliary_loss(
    router_logits: Float[Array, "M E"], routing: Routing, mask: Bool[Array, " M"] | None = None
) -> Float[Array, ""]:
    """Compute the load-balancing loss E · Σ_e (assignments of e per token) · (mean probability of e); k when even.

    Switch Transformer (arXiv 2101.03961, equations 4–6) for k experts, as in Hugging Face's `load_balancing_loss_func`
    for one layer. The gradient flows through the probabilities.

    Args:
        router_logits: the logits that `routing` was made from.
        routing: each token's experts.
        mask: False for tokens to leave out, such as padding.
    """
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    load = jax.lax.stop_gradient(_load(routing, mask))
    return router_logits.shape[-1] * (load * _mean(probabilities, mask)).sum()


def z_loss(router_logits: Float[Array, "M E"], mask: Bool[Array, " M"] | None = None) -> Float[Array, ""]:
    """Compute the mean of logsumexp(logits)², which keeps logits small (ST-MoE, arXiv 2202.08906, equation 5)."""
    lse = jax.nn.logsumexp(router_logits.astype(jnp.float32), axis=-1)
    return _mean(jnp.square(lse), mask)


def routing_statistics(routing: Routing, mask: Bool[Array, " M"] | None = None) -> dict[str, Array]:
    """Compute how evenly the tokens load the experts, float32.

    Returns:
        load_max: the largest share of assignments of one expert, times E: 1 when even, E when one expert has all.
        load_entropy: entropy of the shares over log E: 1 when even, 0 when one expert has all.
    """
    E = routing.group_sizes.shape[0]
    load = _load(routing, mask) / routing.expert_ids.shape[1]
    entropy = jax.scipy.special.entr(load).sum() / jnp.log(float(max(E, 2)))
    return {"load_max": load.max() * E, "load_entropy": entropy}


def _load(routing: Routing, mask) -> Float[Array, " E"]:
    """Return the assignments of each expert per token."""
    if mask is None:
        return routing.group_sizes.astype(jnp.float32) / routing.expert_ids.shape[0]
    served = jax.nn.one_hot(routing.expert_ids, routing.group_sizes.shape[0], dtype=jnp.float32).sum(1)
    return _mean(served, mask)


def _mean(x: Float[Array, "M *rest"], mask) -> Float[Array, "*rest"]:
    """Average over the unmasked tokens of all devices; zero where there are none."""
    weight = jnp.ones(x.shape[0]) if mask is None else mask.astype(jnp.float32)
    summed = psum_batch((x * weight.reshape(-1, *[1] * (x.ndim - 1))).sum(0))
    return summed / jnp.maximum(psum_batch(weight.sum()), 1.0)
