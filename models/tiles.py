"""Tokens of packed rows pass through a part of a layer tile by tile, so that its temporary values are a tile's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxglue.models.context import PackedContext, RouterLosses
from jaxglue.ops.collectives import psum_batch
from jaxglue.ops.rope import RopeTables


def map_tiles(function: Callable, context: PackedContext, *arrays: Array) -> Any:
    """Apply a function of (context, *arrays [B, T, …]) that treats each token by itself, `context.tile` at a time.

    The backward pass computes each tile again and sums the parameters' gradients over the tiles in their own dtype.

    Returns:
        The function's arrays [B, T, …].

    Raises:
        ValueError: the tile does not divide the tokens.
    """
    B, T = arrays[0].shape[:2]
    count, rest = divmod(B * T, context.tile or B * T)
    if rest:
        raise ValueError(f"a tile of {context.tile} tokens does not divide {B} × {T} tokens: use a divisor")
    by_token = context.rope, context.segments.segment_ids
    tiled = jax.checkpoint(function, prevent_cse=False)

    def step(_, inputs):
        index, values, tiles = inputs
        return None, tiled(_tile_context(context, index, *values), *tiles)

    inputs = jnp.arange(count), *jax.tree.map(lambda a: _split(a, count), (by_token, arrays))
    _, results = lax.scan(step, None, inputs)
    return jax.tree.map(lambda a: a.reshape(B, T, *a.shape[3:]), results)


def _split(array: Array, count: int) -> Array:
    """Return tiles [count, 1, tokens, …] of an array [B, T, …]; the tokens stay where they are."""
    return array.reshape(count, 1, -1, *array.shape[2:])


def _tile_context(context: PackedContext, index: Array, rope: RopeTables, segment_ids: Array) -> PackedContext:
    """Return the context of a tile: with its tokens' values, and dropout of its own."""
    segments = replace(context.segments, segment_ids=segment_ids)
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, index)
    tile = replace(context, segments=segments, rope=rope, dropout_key=key, attention_out=None, tile=None)
    return tile if context.router_losses is None else replace(tile, router_losses=_tile_losses(context, tile))


def _tile_losses(context: PackedContext, tile: PackedContext) -> RouterLosses:
    """Weight the z-loss of a tile, a mean over its tokens, by its share of all tokens."""
    assert context.router_losses is not None
    tokens, every = (psum_batch(part.token_mask.sum(dtype=jnp.float32)) for part in (tile, context))
    return context.router_losses._replace(z=context.router_losses.z * tokens / jnp.maximum(every, 1.0))
