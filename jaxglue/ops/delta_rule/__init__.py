"""The gated delta rule (arXiv 2412.06464) over packed documents, and the operations of its layer around it.

Every state begins empty at a document's first token, so a document's outputs do not depend on its neighbors.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.delta_rule.convolution import causal_convolution
from jaxglue.ops.delta_rule.gated_norm import gated_rms_norm
from jaxglue.ops.delta_rule.reference import gates, reference_delta_rule
from jaxglue.ops.segments import PackedSegments

__all__ = [
    "DELTA_RULE",
    "causal_convolution",
    "gated_delta_rule",
    "gated_rms_norm",
    "gates",
    "reference_delta_rule",
]


def _serves_anywhere(capability: Capability | None, *call: Any) -> None:
    """Find no obstacle."""


DELTA_RULE = Operation(
    name="delta rule",
    backends={
        "chunked": Backend(
            check=_serves_anywhere,
            load=lambda capability, *call: ChunkedDeltaRule(),
            advantage="tokens of a chunk are multiplied together",
            anywhere=True,
        )
    },
)


def gated_delta_rule(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    segments: PackedSegments,
    *,
    backend: str = "auto",
) -> Float[Array, "B T N V"]:
    """Read and write a state S [H, V] per value head, in the order of a document's tokens.

    With q and k of unit length, q also over √H: S ← exp(g)·S; S ← S + k ⊗ β(v − Sᵀk); out = Sᵀq. S is float32 and 0 at
    each document's first token. Padding's outputs are 0. Value head n uses queries and keys of head ⌊n·K/N⌋.

    Args:
        q, k: queries and keys of any length, in one dtype.
        v: values.
        g: logarithm of each token's decay, at most 0; float32, see `gates`.
        beta: step size of each token's update.
        segments: the rows' documents.
        backend: `auto`, `reference` or `chunked`; see `DELTA_RULE.choose`.

    Raises:
        ValueError: shapes or dtypes that do not fit, forked segments, or a named backend that cannot serve.
    """
    _check(q, k, v, g, beta, segments)
    rule = DELTA_RULE.load(v.dtype, backend=backend) or reference_delta_rule
    return rule(q, k, v, g, beta, segments)


def _check(q, k, v, g, beta, segments: PackedSegments) -> None:
    if q.ndim != 4 or k.shape != q.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q and k must be [B, T, K, H] in v's dtype, got {q.shape} {q.dtype}, {k.shape} {k.dtype} and {v.dtype}"
        )
    B, T, K, _ = q.shape
    if v.ndim != 4 or v.shape[:2] != (B, T) or v.shape[2] % K:
        raise ValueError(f"v must be [{B}, {T}, N, V], N a multiple of {K}, to fit q, got shape {v.shape}")
    if not g.shape == beta.shape == v.shape[:3] or g.dtype != jnp.float32:
        raise ValueError(
            f"g and beta must be {v.shape[:3]} to fit v, g float32, got {g.shape} {g.dtype} and {beta.shape}"
        )
    if segments.segment_ids.shape != (B, T):
        raise ValueError(f"segments are of rows {segments.segment_ids.shape}, and q of {(B, T)}")
    if segments.gap_starts is not None:
        raise ValueError("segments fork, and a state follows one continuation: pack the answers as documents")
