"""Attention over a dense mask in float32, the definition; memory grows with T²."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments


def reference_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K values"],
    segments: PackedSegments,
    *,
    window: int | None,
    sinks: Float[Array, " N"] | None,
    softcap: float | None = None,
) -> Float[Array, "B T N values"]:
    """Compute causal attention inside each segment, softmax in float32; padding gives zeros.

    Queries are the S tokens of a row, or some of them (`PackedSegments.own_keys`).
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    q_index = jnp.arange(T)[:, None] if segments.own_keys is None else segments.own_keys[:, :, None]
    k_index = jnp.arange(S)[None, :]
    visible = (k_index <= q_index) & (k_index >= segments.starts[:, :, None])
    if segments.gap_starts is not None and segments.gap_ends is not None:
        visible &= (k_index < segments.gap_starts[:, :, None]) | (k_index >= segments.gap_ends[:, :, None])
        if window is not None:
            visible &= segments.positions[:, None, :] > segments.positions[:, :, None] - window
    elif window is not None:
        visible &= k_index > q_index - window
    visible = visible[:, None, None]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * H**-0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, -jnp.inf)
    sink = jnp.full((N,), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    sink = sink.reshape(1, K, N // K, 1, 1)
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak)
    weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(B, T, N, -1).astype(q.dtype)
