"""States that outlast a pass: those behind packed documents, and a token's step from one to the next."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.delta_rule.reference import DeltaHeads, normalize
from jaxglue.ops.delta_rule.states import last_chunks
from jaxglue.ops.segments import PackedSegments


def last_states(
    k: Float[Array, "B T N H"],
    g: Float[Array, "B T N H"],
    updates: Float[Array, "B T N V"],
    states: Float[Array, "B chunks N H V"],
    segments: PackedSegments,
    chunk: int,
) -> Float[Array, "B S N H V"]:
    """Return the state behind each document in float32, as the delta rule's `last_states` by decays of channels."""

    def of_row(k, g, updates, states, bounds):
        tokens, weights, decay, before, is_carried = last_chunks(g, bounds, chunk)
        keys = jnp.where(weights > 0, weights * k[tokens], 0.0)
        total = jnp.einsum("scnh,scnv->snhv", keys, updates[tokens], precision=lax.Precision.HIGHEST)
        decayed = decay[..., None] * states[before]
        return total + jnp.where(is_carried[:, None, None, None], decayed, 0.0)

    return jax.vmap(of_row)(k, g, updates, states, jnp.asarray(segments.cu_seqlens))


def kda_step(
    qkv: Float[Array, "S W"],
    g: Float[Array, "S N H"],
    beta: Float[Array, "S N"],
    states: Float[Array, "S N H V"],
    heads: DeltaHeads,
) -> tuple[Float[Array, "S N V"], Float[Array, "S N H V"]]:
    """Return `kimi_delta_attention`'s output of a token, and the states behind it."""
    q, k, v = (x[:, 0] for x in heads.split(qkv[:, None]))
    q, k = normalize(q, k)
    decayed = jnp.exp(g)[..., None] * states
    read = jnp.einsum("snhv,snch->sncv", decayed, jnp.stack([k, q], 2), precision=lax.Precision.HIGHEST)
    update = beta.astype(jnp.float32)[..., None] * (v.astype(jnp.float32) - read[..., 0, :])
    out = read[..., 1, :] + jnp.sum(q * k, -1, keepdims=True) * update
    return out.astype(v.dtype), decayed + k[..., None] * update[..., None, :]
