"""Attention over cache pages in plain JAX, which gathers them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def reference_paged_attention(
    q: Float[Array, "S N H"],
    keys: Float[Array, "pages K page H"],
    values: Float[Array, "pages K page H"],
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "S N H"]:
    """See `paged_attention`; softmax in float32."""
    (S, N, H), (_, K, page, _) = q.shape, keys.shape
    grouped = q.reshape(S, K, N // K, H)
    scores = jnp.einsum("skgh,spkch->skgpc", grouped, keys[tables], preferred_element_type=jnp.float32)
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
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(index)].astype(values.dtype)
    weights = weights.reshape(*grouped.shape[:3], -1, page)
    out = jnp.einsum("skgpc,spkch->skgh", weights, values[tables], preferred_element_type=jnp.float32)
    return out.reshape(S, N, H).astype(q.dtype)
