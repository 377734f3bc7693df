"""Expert parallelism: every device computes with its share of the experts on all devices' tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.collectives import axis_size
from jaxglue.ops.moe.reference import ExpertLora
from jaxglue.ops.moe.routing import ROW_TILES, Routing, make_routing

Mlp = Callable[[Float[Array, "M D"], Routing, ExpertLora], Float[Array, "M D"]]
_gather = partial(jax.lax.all_gather, axis_name="expert", tiled=True)
_scatter = partial(jax.lax.psum_scatter, axis_name="expert", scatter_dimension=0, tiled=True)


def expert_parallel(mlp: Mlp, x: Float[Array, "M D"], routing: Routing, adapters: ExpertLora) -> Float[Array, "M D"]:
    """Apply all experts to this device's tokens, with an equal share of the experts on each device along `expert`.

    An all-gather gives every device all tokens; a reduce-scatter sums their outputs. For k experts per token on n
    devices that moves no more than sending a token k times unless k < n, and needs no capacity. Without an `expert`
    axis this is `mlp(x, routing, adapters)`.

    Args:
        mlp: this device's experts, an equal and consecutive share of all.
        x: this device's tokens.
        routing: of these tokens to all experts.
        adapters: of this device's experts.
    """
    devices = axis_size("expert")
    if devices == 1:
        return mlp(x, routing, adapters)
    assert adapters.ranks is None, "tokens that choose among adapters are answered by one device's programs"
    experts = routing.group_sizes.shape[0] // devices
    all_tokens, weights, adapters = _gather_tokens(x, routing.weights, adapters)
    local = _own_routing(routing, _gather(routing.expert_ids), weights, experts, devices)
    return _scatter(mlp(all_tokens, local, adapters))


@jax.custom_vjp
def _gather_tokens(x: Array, weights: Array, adapters: ExpertLora) -> tuple[Array, Array, ExpertLora]:
    """Gather tokens and weights; pass the adapters through, to order the backward pass.

    Adapter gradients are computed while token gradients travel: XLA cannot estimate our kernels and would delay them.
    The weights' small gradients go first, so that they need not wait for the tokens'.
    """
    return _gather(x), _gather(weights), adapters


def _scatter_gradients(_, gradients: tuple[Array, Array, ExpertLora]) -> tuple[Array, Array, ExpertLora]:
    dx, dweights, dadapters = gradients
    dx, dweights = jax.lax.optimization_barrier((dx, _scatter(dweights)))
    dx, dadapters = jax.lax.optimization_barrier((_scatter(dx), dadapters))
    return dx, dweights, dadapters


_gather_tokens.defvjp(lambda *arguments: (_gather_tokens(*arguments), None), _scatter_gradients)


def _own_routing(routing: Routing, expert_ids, weights, experts: int, devices: int) -> Routing:
    """Return the routing of all tokens to this device's experts; rows of other experts come last, in no group."""
    ids = expert_ids - jax.lax.axis_index("expert") * experts
    here = (ids >= 0) & (ids < experts)
    row_tile = min(routing.groups.tiles.rows * devices, ROW_TILES[1])
    local = make_routing(jnp.where(here, ids, experts), jnp.where(here, weights, 0), experts, row_tile=row_tile)
    return replace(local, inverse=jnp.where(here, local.inverse, local.permutation.size))
