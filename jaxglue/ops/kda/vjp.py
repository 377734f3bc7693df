"""Kimi Delta Attention by kernels: XLA forms and differentiates the parts of chunks, kernels follow the states."""

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops.delta_rule.reference import DeltaHeads
from jaxglue.ops.kda.chunks import BLOCK, GROUP, begun_before, chunk_parts, in_groups
from jaxglue.ops.segments import PackedSegments

_ROUNDED = "asked", "read", "written", "scores"
"""Parts in the activations' dtype."""
_LEAST_STEP = 1e-12
"""β of real tokens at least: its gradient is that of u over it. No output changes by it."""


class KernelParts(NamedTuple):
    """Parts of chunks, see `chunks.ChunkParts`, and β, in the layout of `kernels.py`."""

    asked: Float[Array, "B N T H"]
    read: Float[Array, "B N T H"]
    written: Float[Array, "B N T H"]
    kept: Float[Array, "B N chunks H"]
    scores: Float[Array, "B N T C"]
    similar: Float[Array, "B N T C"]
    beta: Float[Array, "B N T"]


class KDABackend(Protocol):
    """Kernels of a forward and a backward pass."""

    chunk: int

    def forward(self, parts: KernelParts, values, starts, ends, *, dtype=None) -> tuple[Array, Any]:
        """Return (outputs [B, T, N, V], what the backward pass reads: inverses, u and states, in dtype)."""

    def backward(self, parts: KernelParts, kept: Any, starts, ends, dout) -> tuple[KernelParts, Array]:
        """Return the gradients to parts and values."""


class KernelRows(NamedTuple):
    """Rows with a whole number of chunks: their parts, values, and documents' bounds."""

    parts: KernelParts
    values: Float[Array, "B T N V"]
    starts: Any
    ends: Any


def chunked_rows(kernels: KDABackend, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads) -> KernelRows:
    """Return the parts of all chunks, a few at a time; the backward pass computes them again."""
    B, T, _ = qkv.shape
    group = min(GROUP, -(-T // kernels.chunk))
    whole = -(-T // (group * kernels.chunk)) * group * kernels.chunk
    extended = partial(_extended, length=whole)
    step = jnp.maximum(beta.astype(jnp.float32), _LEAST_STEP)
    step = jnp.where(segments.segment_ids[..., None] > 0, step, 0.0)
    q, k, v = heads.split(qkv)
    split, carried = partial(in_groups, chunk=kernels.chunk, group=group), begun_before(segments, kernels.chunk)
    precision = lax.Precision.HIGHEST if qkv.dtype == jnp.float32 else lax.Precision.DEFAULT

    @jax.checkpoint
    def of_group(arrays):
        q, k, g, ids, carried = arrays
        parts = chunk_parts(q, k, g, ids, carried, BLOCK, precision)
        return parts._replace(**{name: getattr(parts, name).astype(qkv.dtype) for name in _ROUNDED})

    parts = lax.map(of_group, (*map(split, (q, k, g, segments.segment_ids)), split(carried)))

    def joined(x):
        """Return [B, N, tokens or chunks, …] of [groups, B, chunks, N, …]."""
        x = jnp.moveaxis(x, 3, 1)  # [groups, N, B, chunks, …]
        x = jnp.moveaxis(x, 0, 2)  # [N, B, groups, chunks, …]
        return x.swapaxes(0, 1)

    of_tokens = {
        name: joined(getattr(parts, name)).reshape(B, heads.values, whole, -1)
        for name in parts._fields
        if name != "kept"
    }
    kept = joined(parts.kept).reshape(B, heads.values, whole // kernels.chunk, -1)
    starts, ends = (_extended(jnp.asarray(x), whole, fill=whole) for x in (segments.starts, segments.ends))
    return KernelRows(
        KernelParts(**of_tokens, kept=kept, beta=extended(step).swapaxes(1, 2)), extended(v), starts, ends
    )


def _extended(x, length: int, fill=0):
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def kernel_kda(
    kernels: KDABackend, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads
) -> Float[Array, "B T N V"]:
    """Compute `kimi_delta_attention` by kernels."""
    rows = chunked_rows(kernels, qkv, g, beta, segments, heads)
    return _follow(kernels, rows.parts, rows.values, rows.starts, rows.ends)[:, : qkv.shape[1]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _follow(kernels: KDABackend, parts: KernelParts, values, starts, ends) -> Float[Array, "B T N V"]:
    return kernels.forward(parts, values, starts, ends)[0]


def _forward(kernels, parts, values, starts, ends):
    out, kept = kernels.forward(parts, values, starts, ends)
    return out, (parts, kept, starts, ends)


def _backward(kernels, residuals, dout):
    parts, kept, starts, ends = residuals
    return *kernels.backward(parts, kept, starts, ends, dout), None, None


_follow.defvjp(_forward, _backward)
