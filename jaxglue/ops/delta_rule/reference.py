"""The gated delta rule token by token, in float32: the definition."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments

_EPS = 1e-6


def normalize(q: Float[Array, "*B K"], k: Float[Array, "*B K"]) -> tuple[Float[Array, "*B K"], Float[Array, "*B K"]]:
    """Divide queries and keys by their lengths, and queries by √K too, in float32."""
    q, k = (x.astype(jnp.float32) for x in (q, k))
    q, k = (x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


class DeltaHeads(NamedTuple):
    """Heads of queries, keys and values that lie side by side in qkv [B, T, 2·K·H + N·V]."""

    keys: int
    """K, of queries too."""
    values: int
    """N, a multiple of K."""
    key_dim: int
    """H."""

    def value_dim(self, width: int) -> int:
        """Return V, for a token's `width` values in qkv."""
        return (width - 2 * self.keys * self.key_dim) // self.values

    def split(
        self, qkv: Float[Array, "B T W"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"], Float[Array, "B T N V"]]:
        """Return queries, keys and values."""
        key_width = self.keys * self.key_dim
        q, k, v = jnp.split(qkv, (key_width, 2 * key_width), axis=-1)
        keys = *qkv.shape[:2], self.keys, self.key_dim
        return q.reshape(keys), k.reshape(keys), v.reshape(*qkv.shape[:2], self.values, -1)


def gates(
    a: Float[Array, "B T N"], b: Float[Array, "B T N"], A_log: Float[Array, " N"], dt_bias: Float[Array, " N"]
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Return the logarithm of each token's decay, −exp(A_log)·softplus(a + dt_bias) in float32, and β = sigmoid(b)."""
    a, A_log, dt_bias = (x.astype(jnp.float32) for x in (a, A_log, dt_bias))
    return -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


def reference_delta_rule(q, k, v, g, beta, segments: PackedSegments) -> Float[Array, "B T N V"]:
    """Compute `gated_delta_rule` by a scan over the tokens; its gradient keeps every token's state.

    Sums are of products, not matmuls: a document's outputs are then the same to the bit wherever it lies in a row.
    """
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in normalize(q, k))
    real = segments.segment_ids > 0
    beta = jnp.where(real[..., None], beta.astype(jnp.float32), 0.0)
    tokens = (q, k, v.astype(jnp.float32), g.astype(jnp.float32), beta, segments.positions > 0)

    def step(state, token):
        q, k, v, g, beta, inside = token
        state = jnp.where(inside[:, None, None, None], state * jnp.exp(g)[..., None, None], 0.0)
        update = beta[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))
        state = state + k[..., None] * update[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    B, _, N, V = v.shape
    empty = jnp.zeros((B, N, q.shape[-1], V), jnp.float32)
    _, out = lax.scan(step, empty, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype)
