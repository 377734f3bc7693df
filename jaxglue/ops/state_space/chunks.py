"""Mamba-2's recurrence by chunks: matmuls within a chunk, states from chunk to chunk, on any device.

With γᵢⱼ the decay from token j to i where one document holds both, else 0, and Γᵢ that from the chunk's beginning where
i's document began before, else 0, and the state H [S, P] at the chunk's beginning,

    oᵢ = Γᵢ Hᵀcᵢ + Σ_{j≤i} γᵢⱼ (cᵢ·bⱼ) Δⱼxⱼ + D xᵢ        H' = Γ_end H + Σ γ_end,j bⱼ ⊗ Δⱼxⱼ

Boundaries need no more than zeros among γ, wherever they lie.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.delta_rule.chunks import chunk_decays
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.state_space.reference import StateHeads

CHUNK = 64
"""Tokens of a chunk."""
GROUP = 8
"""Chunks whose matmuls run at once; the backward pass computes a group again from its first state."""


@dataclass(frozen=True)
class ChunkedStateSpace:
    """`state_space` by chunks, in groups; float32, with products of TF32 where the arguments are of 16 bits."""

    chunk: int = CHUNK
    group: int = GROUP

    def __call__(self, xbc, step, g, skip, segments: PackedSegments, heads: StateHeads) -> Float[Array, "B T N P"]:
        """Compute the outputs; gradients keep the arguments and each group's first state."""
        return self._compute(xbc, step, g, skip, segments, heads, with_states=False)[0]

    def with_states(
        self, xbc, step, g, skip, segments: PackedSegments, heads: StateHeads
    ) -> tuple[Float[Array, "B T N P"], Float[Array, "B chunks N S P"]]:
        """Return the outputs, and the states before all chunks."""
        return self._compute(xbc, step, g, skip, segments, heads, with_states=True)

    def _compute(self, xbc, step, g, skip, segments: PackedSegments, heads: StateHeads, *, with_states) -> Any:
        (B, T, _), G, N = xbc.shape, heads.groups, heads.values
        group = min(self.group, -(-T // self.chunk))
        groups = -(-T // (group * self.chunk))

        def split(x, *heads: int):
            """Return [groups, B, chunks, heads, C, …] of [B, T, …], filled up with zeros."""
            x = jnp.pad(x, [(0, 0), (0, groups * group * self.chunk - T)] + [(0, 0)] * (x.ndim - 2))
            x = x.reshape(B, groups, group, self.chunk, *heads, *x.shape[2 + bool(heads) :])
            return jnp.moveaxis(x.swapaxes(0, 1), 3, 3 + len(heads))

        x, b, c = (y.astype(jnp.float32) for y in heads.split(xbc))
        x = jnp.where((segments.segment_ids > 0)[..., None, None], x, 0.0)
        ids = split(segments.segment_ids)
        offsets = split(jnp.broadcast_to(jnp.arange(T) % self.chunk, (B, T)))
        carried = (ids > 0) & (split(segments.positions) > offsets)
        of_values = G, N // G
        gates = (split(y.astype(jnp.float32), *of_values) for y in (step, g))
        arrays = split(x, *of_values), split(b, G, 1), split(c, G, 1), *gates, ids, carried
        empty = jnp.zeros((B, *of_values, heads.state_dim, heads.value_dim), jnp.float32)
        precision = lax.Precision.HIGHEST if xbc.dtype == jnp.float32 else lax.Precision.DEFAULT
        body = jax.checkpoint(partial(_group, precision=precision, with_states=with_states))
        _, (out, *others) = lax.scan(body, empty, arrays)
        out = jnp.moveaxis(out, 5, 3).swapaxes(0, 1).reshape(B, groups * group * self.chunk, N, -1)[:, :T]
        out = (out + skip.astype(jnp.float32)[:, None] * x).astype(xbc.dtype)
        if not with_states:
            return (out,)
        (states,) = others
        return out, states.swapaxes(0, 1).reshape(B, groups * group, N, *states.shape[-2:])


def _group(state, arrays, *, precision, with_states: bool) -> tuple[Array, tuple[Array, ...]]:
    """Return the state after a group's chunks, and their outputs [B, chunks, G, N/G, C, P], likewise states."""
    x, b, c, step, g, ids, carried = arrays
    multiply = partial(jnp.einsum, precision=precision)
    decays, from_start, to_end = chunk_decays(g, ids, carried)
    written = step[..., None] * x
    scores = decays * multiply("...is,...js->...ij", c, b)
    within = multiply("...ij,...jp->...ip", scores, written)
    added = multiply("...js,...jp->...sp", to_end[..., None] * b, written)
    chunks = within, added, from_start[..., None] * c, from_start[..., -1]

    def advance(state, chunk):
        within, added, queries, kept = chunk
        out = within + multiply("...is,...sp->...ip", queries, state)
        return kept[..., None, None] * state + added, ((out, state) if with_states else (out,))

    state, results = lax.scan(advance, state, jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), chunks))
    return state, tuple(jnp.moveaxis(y, 0, 1) for y in results)
