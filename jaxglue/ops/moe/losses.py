"""What keeps a router healthy, and what shows whether it is."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxglue.ops.collectives import all_rows
from jaxglue.ops.moe.routing import Routing


def auxiliary_loss(
    router_logits: Float[Array, "M E"], routing: Routing, mask: Bool[Array, " M"] | None = None
) -> Float[Array, ""]:
    """Load balancing, E · Σ_e (assignments of e per token) · (mean probability of e): k when the load is even.

    Switch Transformer (arXiv 2101.03961, equations 4–6) for k experts, as in Hugging Face's `load_balancing_loss_func`
    for one layer. The gradient goes through the probabilities.

    Args:
        router_logits: what `routing` was made from.
        routing: the choice.
        mask: False for tokens that do not count, such as padding.
    """
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    load = jax.lax.stop_gradient(_load(routing, mask))
    return router_logits.shape[-1] * (load * _mean(probabilities, mask)).sum()


def z_loss(router_logits: Float[Array, "M E"], mask: Bool[Array, " M"] | None = None) -> Float[Array, ""]:
    """Mean of logsumexp(logits)², which keeps the logits small (ST-MoE, arXiv 2202.08906, equation 5)."""
    lse = jax.nn.logsumexp(router_logits.astype(jnp.float32), axis=-1)
    return _mean(jnp.square(lse), mask)


def routing_statistics(routing: Routing, mask: Bool[Array, " M"] | None = None) -> dict[str, Array]:
    """Figures for the metrics, float32.

    Returns:
        load [E]: share of the assignments of each expert; sums to 1.
        load_max: the largest share times E: 1 when even, E when one expert has all.
        load_entropy: entropy of the load over log E: 1 when even, 0 when one expert has all.
        dropped: assignments that were not computed: always 0, since no expert has a capacity.
    """
    E = routing.group_sizes.shape[0]
    load = _load(routing, mask) / routing.expert_ids.shape[1]
    entropy = jax.scipy.special.entr(load).sum() / jnp.log(float(max(E, 2)))
    return {"load": load, "load_max": load.max() * E, "load_entropy": entropy, "dropped": jnp.zeros(())}


def _load(routing: Routing, mask) -> Float[Array, " E"]:
    """Assignments of each expert per token."""
    if mask is None:
        return routing.group_sizes.astype(jnp.float32) / routing.expert_ids.shape[0]
    served = jax.nn.one_hot(routing.expert_ids, routing.group_sizes.shape[0], dtype=jnp.float32).sum(1)
    return _mean(served, mask)


def _mean(x: Float[Array, "M *rest"], mask) -> Float[Array, "*rest"]:
    """Mean over the tokens that count, those of all devices; zero where none does."""
    weight = jnp.ones(x.shape[0]) if mask is None else mask.astype(jnp.float32)
    summed = all_rows((x * weight.reshape(-1, *[1] * (x.ndim - 1))).sum(0))
    return summed / jnp.maximum(all_rows(weight.sum()), 1.0)
