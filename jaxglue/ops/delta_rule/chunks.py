"""The gated delta rule by chunks: matmuls within a chunk, states from chunk to chunk, on any device.

Token i of a chunk adds kᵢ ⊗ uᵢ to the state S, [K, V] at the chunk's beginning. With γᵢⱼ the decay from token j to i
where one document holds both, else 0, and γᵢ that from the chunk's beginning where i's document began before, else 0,

    uᵢ = βᵢ (vᵢ − γᵢ Sᵀkᵢ − Σ_{j<i} γᵢⱼ (kᵢ·kⱼ) uⱼ)        oᵢ = γᵢ Sᵀqᵢ + Σ_{j≤i} γᵢⱼ (qᵢ·kⱼ) uⱼ

so a unit triangular system gives U = U₀ − W S, whose U₀ and W need no state. Boundaries need no more than zeros among
γ, wherever they lie. The system is solved by substitution: where keys are alike, the powers of its matrix overflow.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from jaxglue.ops.delta_rule.reference import normalize
from jaxglue.ops.segments import PackedSegments

CHUNK = 64
"""Tokens of a chunk."""
GROUP = 16
"""Chunks whose matmuls run at once; the backward pass computes a group again from its first state."""


@dataclass(frozen=True)
class ChunkedDeltaRule:
    """`gated_delta_rule` by chunks, in groups; float32, with products of TF32 where the arguments are of 16 bits."""

    chunk: int = CHUNK
    group: int = GROUP

    def __call__(self, q, k, v, g, beta, segments: PackedSegments) -> Float[Array, "B T N V"]:
        """Compute the outputs; gradients keep the arguments and each group's first state."""
        return self._compute(q, k, v, g, beta, segments, with_states=False)[0]

    def with_states(
        self, q, k, v, g, beta, segments: PackedSegments
    ) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"], Float[Array, "B chunks N H V"]]:
        """Return the outputs, u, and the states before all chunks."""
        return self._compute(q, k, v, g, beta, segments, with_states=True)

    def _compute(self, q, k, v, g, beta, segments: PackedSegments, *, with_states: bool) -> tuple[Any, ...]:
        (B, T, K), (N, V) = k.shape[:3], v.shape[2:]
        group = min(self.group, -(-T // self.chunk))
        groups = -(-T // (group * self.chunk))

        def split(x, *heads: int):
            """Return [groups, B, chunks, heads, C, …] of [B, T, …], filled up with zeros."""
            x = jnp.pad(x, [(0, 0), (0, groups * group * self.chunk - T)] + [(0, 0)] * (x.ndim - 2))
            x = x.reshape(B, groups, group, self.chunk, *heads, *x.shape[2 + bool(heads) :])
            return jnp.moveaxis(x.swapaxes(0, 1), 3, 3 + len(heads))

        ids = split(segments.segment_ids)
        offsets = split(jnp.broadcast_to(jnp.arange(T) % self.chunk, (B, T)))
        carried = (ids > 0) & (split(segments.positions) > offsets)
        beta = jnp.where(segments.segment_ids[..., None] > 0, beta.astype(jnp.float32), 0.0)
        heads = K, N // K
        arrays = split(q, K, 1), split(k, K, 1), split(v, *heads), split(g.astype(jnp.float32), *heads)
        empty = jnp.zeros((B, *heads, q.shape[-1], V), jnp.float32)
        precision = lax.Precision.HIGHEST if v.dtype == jnp.float32 else lax.Precision.DEFAULT
        body = jax.checkpoint(partial(_group, precision=precision, with_states=with_states))
        _, (out, *others) = lax.scan(body, empty, (*arrays, split(beta, *heads), ids, carried))

        def joined(x):
            return jnp.moveaxis(x, 5, 3).swapaxes(0, 1).reshape(B, groups * group * self.chunk, N, V)[:, :T]

        if not with_states:
            return (joined(out).astype(v.dtype),)
        updates, states = others
        states = states.swapaxes(0, 1).reshape(B, groups * group, N, *states.shape[-2:])
        return joined(out).astype(v.dtype), joined(updates), states


def _group(state, arrays, *, precision, with_states: bool) -> tuple[Array, tuple[Array, ...]]:
    """Return the state after a group's chunks, and their outputs [B, chunks, K, N/K, C, V], likewise u and states."""
    q, k, v, g, beta, ids, carried = arrays
    multiply = partial(jnp.einsum, precision=precision)
    q, k = normalize(q, k)
    decays, from_start, to_end = chunk_decays(g, ids, carried)
    V = v.shape[-1]

    below = jnp.tril(multiply("...id,...jd->...ij", k, k), -1)
    right = jnp.concatenate([jnp.broadcast_to(v, (*g.shape, V)), from_start[..., None] * k], axis=-1)
    system = beta[..., None] * decays * below
    solved = solve_triangular(system, beta[..., None] * right, lower=True, unit_diagonal=True)
    scores = decays * multiply("...id,...jd->...ij", q, k)
    last = from_start[..., -1]
    chunks = solved[..., :V], solved[..., V:], from_start[..., None] * q, scores, to_end[..., None] * k, last

    def step(state, chunk):
        values, against, queries, scores, keys, last = chunk
        updates = values - multiply("...ck,...kv->...cv", against, state)
        out = multiply("...ck,...kv->...cv", queries, state) + multiply("...ij,...jv->...iv", scores, updates)
        results = (out, updates, state) if with_states else (out,)
        return last[..., None, None] * state + multiply("...ck,...cv->...kv", keys, updates), results

    state, results = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks))
    return state, tuple(jnp.moveaxis(x, 0, 1) for x in results)


def chunk_decays(g, ids, carried) -> tuple[Any, Any, Any]:
    """Return the decays from token to token [..., C, C], from the chunk's beginning and to its end [..., C].

    Each exponent is a sum of its own tokens' logarithms: differences of sums from the chunk's beginning would cancel.
    """
    C = g.shape[-1]
    lower = jnp.tril(jnp.ones((C, C), jnp.float32))
    between = jnp.tril(g[..., :, None] * jnp.ones(C), -1)  # at (l, j) the logarithm of l where j < l
    sums = jnp.matmul(lower, between, precision=lax.Precision.HIGHEST)
    ids, carried = ids[:, :, None, None], carried[:, :, None, None]
    same = (ids[..., :, None] == ids[..., None, :]) & (ids[..., :, None] > 0) & (lower > 0)
    decays = jnp.where(same, jnp.exp(sums), 0.0)
    from_start = jnp.where(carried, jnp.exp(jnp.cumsum(g, axis=-1)), 0.0)
    return decays, from_start, decays[..., -1, :]
