"""Kimi Delta Attention (arXiv 2510.26692) token by token, in float32: the definition."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.delta_rule.reference import DeltaHeads, normalize
from jaxglue.ops.segments import PackedSegments


def channel_decays(
    f: Float[Array, "B T W"], A_log: Float[Array, " N"], dt_bias: Float[Array, " W"], least: float | None = None
) -> Float[Array, "B T N H"]:
    """Return the logarithm of each channel's decay in float32, with W = N·H: −exp(A_log)·softplus(f + dt_bias).

    With a least logarithm, that times sigmoid(exp(A_log)·(f + dt_bias)), rounded as f is (Ling 3's safe gate).
    """
    inputs = (f.astype(jnp.float32) + dt_bias.astype(jnp.float32)).reshape(*f.shape[:-1], len(A_log), -1)
    rate = jnp.exp(A_log.astype(jnp.float32))[:, None]
    if least is None:
        return -rate * jax.nn.softplus(inputs)
    return (least * jax.nn.sigmoid(rate * inputs)).astype(f.dtype).astype(jnp.float32)


def reference_kda(qkv, g, beta, segments: PackedSegments, heads: DeltaHeads) -> Float[Array, "B T N V"]:
    """Compute `kimi_delta_attention` by a scan over the tokens; its gradient keeps every token's state.

    Sums are of products, not matmuls: a document's outputs are then the same to the bit wherever it lies in a row.
    """
    q, k, v = heads.split(qkv)
    q, k = normalize(q, k)
    beta = jnp.where(segments.segment_ids[..., None] > 0, beta.astype(jnp.float32), 0.0)
    tokens = q, k, v.astype(jnp.float32), g, beta, segments.positions > 0

    def step(state, token):
        q, k, v, g, beta, inside = token
        state = jnp.where(inside[:, None, None, None], state * jnp.exp(g)[..., None], 0.0)
        update = beta[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))
        state = state + k[..., None] * update[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    B, _, N, V = v.shape
    empty = jnp.zeros((B, N, heads.key_dim, V), jnp.float32)
    _, out = lax.scan(step, empty, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype)
