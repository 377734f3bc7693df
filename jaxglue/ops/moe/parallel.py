"""Experts on several devices: tokens travel to them, and what they make of a token back to it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.collectives import axis_size
from jaxglue.ops.moe.groups import ROW_TILES
from jaxglue.ops.moe.mlp import ExpertLora
from jaxglue.ops.moe.routing import Routing, make_routing

Mlp = Callable[[Float[Array, "M D"], Routing, ExpertLora], Float[Array, "M D"]]
_gather = partial(jax.lax.all_gather, axis_name="expert", tiled=True)
_scatter = partial(jax.lax.psum_scatter, axis_name="expert", scatter_dimension=0, tiled=True)


def expert_parallel(mlp: Mlp, x: Float[Array, "M D"], routing: Routing, adapters: ExpertLora) -> Float[Array, "M D"]:
    """What all experts make of this device's tokens, each device along `expert` computing with those that it has.

    Every device gets the tokens of all of them and returns its experts' share of each: for k experts of a token on n
    devices that is no more than sending a token k times, unless k < n, and it needs no capacity. Without such an axis
    this is `mlp(x, routing, adapters)`.

    Args:
        mlp: the experts of this device, an equal part of all in order.
        x: this device's tokens.
        routing: of these tokens to all experts.
        adapters: of this device's experts.
    """
    devices = axis_size("expert")
    if devices == 1:
        return mlp(x, routing, adapters)
    experts = routing.group_sizes.shape[0] // devices
    everyones, weights, adapters = _gather_tokens(x, routing.weights, adapters)
    own = _to_own(routing, _gather(routing.expert_ids), weights, experts, devices)
    return _scatter(mlp(everyones, own, adapters))


@jax.custom_vjp
def _gather_tokens(x: Array, weights: Array, adapters: ExpertLora) -> tuple[Array, Array, ExpertLora]:
    """All devices' tokens and their experts' weights; the adapters as they are, for the order of the backward pass.

    While tokens' gradients travel back, those of the adapters are computed: XLA, which does not know how long kernels
    take, would leave them for later and wait. The small array goes first: sent behind tokens, it would wait for them.
    """
    return _gather(x), _gather(weights), adapters


def _scatter_gradients(_, gradients: tuple[Array, Array, ExpertLora]) -> tuple[Array, Array, ExpertLora]:
    dx, dweights, dadapters = gradients
    dx, dweights = jax.lax.optimization_barrier((dx, _scatter(dweights)))
    dx, dadapters = jax.lax.optimization_barrier((_scatter(dx), dadapters))
    return dx, dweights, dadapters


_gather_tokens.defvjp(lambda *arguments: (_gather_tokens(*arguments), None), _scatter_gradients)


def _to_own(routing: Routing, expert_ids, weights, experts: int, devices: int) -> Routing:
    """The routing of all devices' tokens to this one's experts; rows of other experts come last, in no group."""
    ids = expert_ids - jax.lax.axis_index("expert") * experts
    here = (ids >= 0) & (ids < experts)
    row_tile = min(routing.groups.tiles.rows * devices, ROW_TILES[1])
    own = make_routing(jnp.where(here, ids, experts), jnp.where(here, weights, 0), experts, row_tile=row_tile)
    return replace(own, inverse=jnp.where(here, own.inverse, own.permutation.size))
