"""Packed attention: one public function, several backends with one meaning."""

from jaxtyping import Array, Float

from jaxglue.attention.reference import reference_attention
from jaxglue.segments import PackedSegments

BACKENDS = ("auto", "reference")


def packed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: PackedSegments,
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Array, "B T N H"]:
    """Causal attention inside each packed segment.

    Args:
        q, k, v: N query heads share K key/value heads (N a multiple of K), head dim H.
        segments: which tokens belong together.
        window: a query sees this many tokens, itself included; None for all.
        sinks: one learned logit per query head that joins the softmax's denominator (GPT-OSS).
        scale: factor on the scores; 1/√H by default.
        backend: one of `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is unknown: use one of {', '.join(BACKENDS)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference_attention(q, k, v, segments, window=window, sinks=sinks, scale=scale)
