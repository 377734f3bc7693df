"""Mamba-2's recurrence (arXiv 2405.21060) token by token, in float32: the definition."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments


class StateHeads(NamedTuple):
    """Heads of values, and groups of keys and queries, side by side in xbc [B, T, N·P + 2·G·S]: x, then B, then C."""

    values: int
    """N, heads of x, each with a state [S, P]."""
    value_dim: int
    """P."""
    groups: int
    """G, a divisor of N: head n has the B and C of group ⌊n·G/N⌋."""
    state_dim: int
    """S."""

    @property
    def value_width(self) -> int:
        """Return the width of x."""
        return self.values * self.value_dim

    @property
    def group_width(self) -> int:
        """Return the width of B, or of C."""
        return self.groups * self.state_dim

    @property
    def width(self) -> int:
        """Return the values of a token in xbc."""
        return self.value_width + 2 * self.group_width

    def split(
        self, xbc: Float[Array, "B T W"]
    ) -> tuple[Float[Array, "B T N P"], Float[Array, "B T G S"], Float[Array, "B T G S"]]:
        """Return x, B and C."""
        x, b, c = jnp.split(xbc, (self.value_width, self.value_width + self.group_width), axis=-1)
        groups = *xbc.shape[:2], self.groups, self.state_dim
        return x.reshape(*xbc.shape[:2], self.values, self.value_dim), b.reshape(groups), c.reshape(groups)


def step_sizes(
    dt: Float[Array, "B T N"], dt_bias: Float[Array, " N"], limits: tuple[float, float]
) -> Float[Array, "B T N"]:
    """Return each token's step size Δ = softplus(dt + dt_bias) within limits, in float32."""
    return jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + dt_bias.astype(jnp.float32)), *limits)


def log_decays(step: Float[Array, "B T N"], A_log: Float[Array, " N"]) -> Float[Array, "B T N"]:
    """Return the logarithm of each token's decay, −exp(A_log)·Δ in float32."""
    return -jnp.exp(A_log.astype(jnp.float32)) * step


def reference_state_space(xbc, step, g, skip, segments: PackedSegments, heads: StateHeads) -> Float[Array, "B T N P"]:
    """Compute `state_space` by a scan over the tokens; its gradient keeps every token's state.

    Sums are of products, not matmuls: a document's outputs are then the same to the bit wherever it lies in a row.
    """
    x, b, c = (y.astype(jnp.float32) for y in heads.split(xbc))
    b, c = (jnp.repeat(y, heads.values // heads.groups, axis=2) for y in (b, c))
    real = segments.segment_ids > 0
    x = jnp.where(real[..., None, None], x, 0.0)
    tokens = x, b, c, step.astype(jnp.float32), g.astype(jnp.float32), segments.positions > 0

    def advance(state, token):
        x, b, c, step, g, inside = token
        state = jnp.where(inside[:, None, None, None], state * jnp.exp(g)[..., None, None], 0.0)
        state = state + b[..., None] * (step[..., None] * x)[..., None, :]
        return state, jnp.sum(state * c[..., None], axis=-2)

    empty = jnp.zeros((len(x), heads.values, heads.state_dim, heads.value_dim), jnp.float32)
    _, out = lax.scan(advance, empty, tuple(jnp.moveaxis(y, 1, 0) for y in tokens))
    out = jnp.where(real[..., None, None], jnp.moveaxis(out, 0, 1), 0.0)
    return (out + skip.astype(jnp.float32)[:, None] * x).astype(xbc.dtype)
