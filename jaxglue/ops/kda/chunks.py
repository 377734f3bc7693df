"""Kimi Delta Attention by chunks: matmuls within a chunk, states from chunk to chunk, on any device.

As the delta rule's chunks (`ops/delta_rule/chunks.py`), with a decay γᵢⱼ for each channel d of the keys:

    scoresᵢⱼ = Σ_d qᵢ,d γᵢⱼ,d kⱼ,d        γᵢⱼ,d = exp(Σ_{j<l≤i} g_l,d)

Decays are no factors of i and of j that float32 holds, since one token's may be e⁻¹⁰⁰. Between blocks of 16 tokens they
are one from j to i's block and one from there to i, neither above 1; within a block they are summed for each pair.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Shaped

from jaxglue.ops.delta_rule.reference import DeltaHeads, normalize
from jaxglue.ops.segments import PackedSegments

CHUNK = 64
"""Tokens of a chunk."""
BLOCK = 16
"""Tokens of a chunk's blocks."""
GROUP = 4
"""Chunks whose matmuls run at once; the backward pass computes a group again from its first state."""


def in_groups(x: Shaped[Array, "B T ..."], chunk: int, group: int) -> Shaped[Array, "groups B chunks ..."]:
    """Return tokens by chunks of groups, filled up with zeros, [groups, B, chunks, …, C, …]; heads before tokens."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % (group * chunk))] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(len(x), -1, group, chunk, *x.shape[2:]).swapaxes(0, 1)
    return x if x.ndim == 4 else x.swapaxes(3, 4)


def begun_before(segments: PackedSegments, chunk: int) -> Bool[Array, "B T"]:
    """Return whether a token's document has begun before its chunk."""
    offsets = jnp.arange(segments.positions.shape[1]) % chunk
    return (segments.segment_ids > 0) & (segments.positions > offsets)


@dataclass(frozen=True)
class ChunkedKDA:
    """`kimi_delta_attention` by chunks, in groups; float32, with products of TF32 of arguments of 16 bits."""

    chunk: int = CHUNK
    block: int = BLOCK
    group: int = GROUP

    def __call__(self, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads) -> Float[Array, "B T N V"]:
        """Compute the outputs; gradients keep the arguments and each group's first state."""
        return self._compute(qkv, g, beta, segments, heads, with_states=False)[0]

    def with_states(
        self, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads
    ) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"], Float[Array, "B chunks N H V"]]:
        """Return the outputs, u of the delta rule's chunks, and the states before all chunks."""
        return self._compute(qkv, g, beta, segments, heads, with_states=True)

    def _compute(self, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads, *, with_states: bool) -> Any:
        q, k, v = heads.split(qkv)
        B, T, N, V = v.shape
        split = partial(in_groups, chunk=self.chunk, group=min(self.group, -(-T // self.chunk)))
        ids, carried = split(segments.segment_ids), split(begun_before(segments, self.chunk))
        beta = jnp.where(segments.segment_ids[..., None] > 0, beta.astype(jnp.float32), 0.0)
        empty = jnp.zeros((B, N, heads.key_dim, V), jnp.float32)
        precision = lax.Precision.HIGHEST if v.dtype == jnp.float32 else lax.Precision.DEFAULT
        body = jax.checkpoint(partial(_group, block=self.block, precision=precision, with_states=with_states))
        _, (out, *others) = lax.scan(body, empty, (*map(split, (q, k, v, g, beta)), ids, carried))

        def joined(x):
            return x.swapaxes(3, 4).swapaxes(0, 1).reshape(B, -1, N, V)[:, :T]

        if not with_states:
            return (joined(out).astype(v.dtype),)
        updates, states = others
        states = states.swapaxes(0, 1).reshape(B, -1, *states.shape[3:])
        return joined(out).astype(v.dtype), joined(updates), states


def _group(state, arrays, *, block: int, precision, with_states: bool) -> tuple[Array, tuple[Array, ...]]:
    """Return the state after a group's chunks, and their outputs [B, chunks, N, C, V], likewise u and states."""
    q, k, v, g, beta, ids, carried = arrays
    multiply = partial(jnp.einsum, precision=precision)
    parts, v = chunk_parts(q, k, g, ids, carried, block, precision), v.astype(jnp.float32)
    right = beta[..., None] * jnp.concatenate([v, parts.read], axis=-1)
    system = beta[..., None] * parts.similar
    solved = solve_triangular(system, right, lower=True, unit_diagonal=True)
    V = v.shape[-1]
    chunks = solved[..., :V], solved[..., V:], parts

    def step(state, chunk):
        values, against, parts = chunk
        updates = values - multiply("...ck,...kv->...cv", against, state)
        out = multiply("...ck,...kv->...cv", parts.asked, state)
        out += multiply("...ij,...jv->...iv", parts.scores, updates)
        results = (out, updates, state) if with_states else (out,)
        return parts.kept[..., None] * state + multiply("...ck,...cv->...kv", parts.written, updates), results

    state, results = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks))
    return state, tuple(jnp.moveaxis(x, 0, 1) for x in results)


class ChunkParts(NamedTuple):
    """Factors between a chunk's tokens, and of these with its state, in float32; 0 across another document."""

    asked: Float[Array, "... C H"]
    """Queries, decayed from the chunk's beginning."""
    read: Float[Array, "... C H"]
    """Keys, likewise."""
    written: Float[Array, "... C H"]
    """Keys, decayed to the chunk's end."""
    kept: Float[Array, "... H"]
    """Decays from the chunk's beginning to its end."""
    scores: Float[Array, "... C C"]
    """Products of queries and keys, on and below the diagonal."""
    similar: Float[Array, "... C C"]
    """Products of keys with keys, below it."""


def chunk_parts(q, k, g, ids, carried, block: int, precision) -> ChunkParts:
    """Return the parts of chunks.

    Args:
        q, k, g: of heads' tokens [..., N, C, H].
        ids: of the tokens' documents [..., C], 0 for none.
        carried: whether a document began before the chunk.
        block: tokens of a block.
        precision: of matmuls.
    """
    q, k = normalize(q, k)
    same = ((ids[..., :, None] == ids[..., None, :]) & (ids[..., :, None] > 0))[..., None, :, :]
    scores = pair_scores(q, k, k, g, block, partial(jnp.einsum, precision=precision))
    of_queries, of_keys = (jnp.where(same, x, 0.0) for x in scores)
    from_start = jnp.where(carried[..., None, :, None], jnp.exp(jnp.cumsum(g, axis=-2)), 0.0)
    to_end = jnp.where(same[..., -1, :, None], jnp.exp(_sum_behind(g)), 0.0)
    products = from_start * q, from_start * k, to_end * k, from_start[..., -1, :]
    return ChunkParts(*products, of_queries, jnp.tril(of_keys, -1))


def pair_scores(q, k, keys, g, block: int, multiply) -> tuple[Array, Array]:
    """Return Σ_d xᵢ,d γᵢⱼ,d keysⱼ,d of x = q and x = k [..., C, C], for j ≤ i; zeros elsewhere.

    Exponents are sums of the logarithms between i and j alone: differences of sums from the chunk's beginning would
    cancel, and read other documents' decays.
    """
    *_, C, H = g.shape
    blocks, places = C // block, jnp.arange(block)

    def cut(x):
        return x.reshape(*x.shape[:-2], blocks, block, H)

    first = jnp.arange(blocks) * block
    before = jnp.arange(C) < first[:, None]  # at (block, j) whether j is in a block before
    to_block = jnp.exp(_sum_behind(jnp.where(before[..., None], g[..., None, :, :], 0.0)))
    far_keys = keys[..., None, :, :] * to_block
    in_block = jnp.exp(jnp.cumsum(cut(g), axis=-2))
    behind = (places[:, None] > places)[..., None]  # at (i, j) whether i is behind j
    near = jnp.exp(jnp.cumsum(jnp.where(behind, cut(g)[..., :, None, :], 0.0), axis=-3)) * cut(keys)[..., None, :, :]
    lower = places[:, None] >= places
    diagonal = jnp.eye(blocks)[:, None, :, None]

    def scores(x):
        far = multiply("...aid,...ajd->...aij", cut(x) * in_block, far_keys)
        far = jnp.where(before[:, None, :], far, 0.0)
        own = jnp.where(lower, jnp.sum(cut(x)[..., :, None, :] * near, axis=-1), 0.0)
        own = own[..., None, :] * diagonal  # [..., block, i, block, j]
        return far.reshape(*far.shape[:-3], C, C) + own.reshape(*own.shape[:-4], C, C)

    return scores(q), scores(k)


def _sum_behind(g: Float[Array, "... C H"]) -> Float[Array, "... C H"]:
    """Return the sum of all tokens behind each."""
    after = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], axis=-2)
    return lax.cumsum(after, axis=after.ndim - 2, reverse=True)
