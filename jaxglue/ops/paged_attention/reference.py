"""Attention over cache pages in plain JAX, which gathers them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.ops.attention.reference import TileSums
from jaxglue.ops.attention.tiles import key_tile
from jaxglue.ops.paged_attention.pages import KVPages
from jaxglue.ops.row_sums import FEWEST_ROWS


def reference_paged_attention(
    q: Float[Array, "S N H"],
    cache: KVPages,
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "S N H"]:
    """See `paged_attention`; softmax in float32."""
    (S, N, H), (_, K, page, _) = q.shape, cache.keys.shape
    grouped = q.reshape(S, K, N // K, H)
    keys, values = cache.read(tables, q.dtype)
    scores = jnp.einsum("skgh,spkch->skgpc", grouped, keys, preferred_element_type=jnp.float32)
    index = jnp.arange(tables.shape[1] * page)
    visible = index <= positions[:, None]
    if window is not None:
        visible &= index > positions[:, None] - window
    scores = scores.reshape(*grouped.shape[:3], -1) * H**-0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, N // K, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(index)].astype(q.dtype)
    weights = weights.reshape(*grouped.shape[:3], -1, page)
    values = jnp.where(visible.reshape(S, -1, 1, page, 1), values, 0)  # 0 · NaN of a page's last owner is NaN
    out = jnp.einsum("skgpc,spkch->skgh", weights, values, preferred_element_type=jnp.float32)
    return out.reshape(S, N, H).astype(q.dtype)


def tiled_paged_attention(
    q: Float[Array, "S N H"],
    cache: KVPages,
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    forks: Int[Array, " S"],
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "S N H"]:
    """See `paged_attention` with `forks`."""
    (S, N, H), (_, K, page, _) = q.shape, cache.keys.shape
    G, A = N // K, key_tile(H)
    R = max(G, FEWEST_ROWS)  # XLA multiplies a single row by another function
    rows = jnp.pad(q.reshape(S, K, G, H), ((0, 0), (0, 0), (0, R - G), (0, 0)))
    before = -(-forks // A)
    tiles = -(-tables.shape[1] * page // A) + 1

    def step(sums: TileSums, tile):
        own = tile >= before
        first = jnp.where(own, forks + (tile - before) * A, tile * A)
        token = first[:, None] + jnp.arange(A)
        visible = (token <= positions[:, None]) & (own[:, None] | (token < forks[:, None]))
        if window is not None:
            visible &= token > positions[:, None] - window
        at = jnp.where(visible, token, 0)
        pages = jnp.take_along_axis(tables, at // page, axis=1)
        k, v = (
            jnp.where(visible[..., None, None], pool[pages, :, at % page], 0).astype(q.dtype).transpose(0, 2, 1, 3)
            for pool in (cache.keys, cache.values)
        )
        return sums.add(rows, k, v, jnp.broadcast_to(visible[:, None, None], (S, K, R, A)), softcap), None

    of_heads = None if sinks is None else jnp.pad(sinks.reshape(1, K, G), ((0, 0), (0, 0), (0, R - G)))
    sums, _ = jax.lax.scan(step, TileSums.begin((S, K, R), H, of_heads), jnp.arange(tiles))
    return sums.result[:, :, :G].reshape(S, N, H).astype(q.dtype)
