"""Attention over cache pages in plain JAX, which gathers them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.ops.paged_attention.pages import KVPages


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
