"""Packed attention: one public function, several backends with one meaning."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops.attention.backends import BACKENDS, AttentionShape, choose_backend
from jaxglue.ops.attention.flash import LSE_NAME, OUT_NAME, FlashSpec, FusedBackend, flash_attention
from jaxglue.ops.attention.reference import reference_attention
from jaxglue.ops.backend import compute_capability, triton_capability
from jaxglue.ops.segments import PackedSegments

__all__ = [
    "BACKENDS",
    "LSE_NAME",
    "OUT_NAME",
    "AttentionShape",
    "choose_backend",
    "packed_attention",
]


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
    """Causal attention inside each packed segment; padding gives zeros and gets no gradient.

    Under `jax.checkpoint`, a policy that saves the names `OUT_NAME` and `LSE_NAME` keeps a fused backend's forward
    kernel from running twice.

    Args:
        q, k, v: N query heads share K key/value heads (N a multiple of K), head dim H.
        segments: which tokens belong together.
        window: a query sees this many tokens, itself included; None for all.
        sinks: one learned logit per query head that joins the softmax's denominator (GPT-OSS).
        scale: factor on the scores; 1/√H by default.
        backend: one of `BACKENDS`; `auto` is decided by `choose_backend` from the shapes and the default device.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit, or a named backend that cannot serve them.
    """
    _check(q, k, v, segments, window, sinks, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    capability = compute_capability()
    shape = _shape(q, k, segments, window)
    choice = choose_backend(shape, backend=backend, capability=capability)
    if choice.name == "reference":
        out = reference_attention(q, k, v, segments, window=window, sinks=sinks, scale=scale)
        return checkpoint_name(out, OUT_NAME)
    assert capability is not None
    spec = FlashSpec(backend=_fused(choice.name, shape, q.shape[1], capability), window=window, scale=scale)
    return flash_attention(spec, q, k, v, sinks, segments)


def _shape(q: Array, k: Array, segments: PackedSegments, window: int | None) -> AttentionShape:
    return AttentionShape(
        dtype=q.dtype,
        head_dim=q.shape[3],
        query_heads=q.shape[2],
        kv_heads=k.shape[2],
        segment_slots=segments.cu_seqlens.shape[1] - 1,
        window=window,
    )


def _fused(name: str, shape: AttentionShape, tokens: int, capability: tuple[int, int]) -> FusedBackend:
    """The backend's object; imported here, because only GPU installations have what it needs."""
    if name == "cudnn":
        from jaxglue.ops.attention.cudnn import CudnnBackend

        return CudnnBackend()
    from jaxglue.ops.attention.tiles import kernel_tiles
    from jaxglue.ops.attention.triton import TritonBackend

    mean_length = tokens // shape.segment_slots
    tiles = kernel_tiles(capability, shape.head_dim, window=shape.window, mean_length=mean_length)
    return TritonBackend(tiles=tiles, compute_capability=triton_capability(capability))


def _check(q, k, v, segments, window, sinks, scale) -> None:
    """Raises ValueError for arguments that do not fit together."""
    if q.ndim != 4:
        raise ValueError(f"q must be [B, T, N, H], got shape {q.shape}")
    B, T, N, H = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (B, T, H):
        raise ValueError(f"k must be [B, T, K, H] = [{B}, {T}, K, {H}] to fit q, got shape {k.shape}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {k.shape}, got {v.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if segments.starts.shape != (B, T):
        raise ValueError(f"segments must be for [B, T] = [{B}, {T}] tokens, got {segments.starts.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 or None, got {window}")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"sinks must have one value for each of the {N} query heads, got shape {sinks.shape}")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
