"""Causal attention inside the segments of packed rows."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops.attention.padded import PaddedValues
from jaxglue.ops.attention.reference import reference_attention, tiled_attention
from jaxglue.ops.attention.rotation import Rotation, rotated_flash_attention, rotated_heads
from jaxglue.ops.attention.tiles import kernel_tiles, largest_head_dim
from jaxglue.ops.attention.vjp import AttentionBackend, FlashSpec, flash_attention
from jaxglue.ops.backend import (
    HOPPER,
    Backend,
    Capability,
    Operation,
    check_capability,
    check_half,
    check_triton,
)
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.row_split import SplitAttention, bounds, whole_rows
from jaxglue.ops.segments import FEW_DOCUMENTS, LONG_DOCUMENT, PackedSegments, as_kernels_read

__all__ = [
    "ATTENTION",
    "AttentionCall",
    "Rotation",
    "packed_attention",
    "rotated_attention",
]

_HOPPER_HEAD_DIMS = (64, 128, 256)
_LATENT_HEAD_DIMS = (192, 128)
"""Head sizes of keys and of values in latent attention (DeepSeek)."""
_NARROWEST = 64
"""Least head dim that the Triton kernels were checked with on a GPU."""
_MOST_CUDNN_SLOTS = 512
"""Documents of a row up to which cuDNN 9.19 was right on an H200, with heads of 32, 64 and 128 columns."""
_ROTATED_HEAD_DIM = 128
"""Head dim whose gradients go through rotation.

ptxas serializes the matmuls of narrower ones in the keys' kernel, and the gradients of wider ones are in two kernels.
"""
_HOPPER_WINDOW = 1024
"""Least window on which Hopper's kernels are the fastest."""
_NARROW_ROW = 65_536
"""Tokens of a row in which they are the fastest on heads of 64."""

_Shaped = Array | jax.ShapeDtypeStruct


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Meaning of attention, and the sizes by which backends are chosen."""

    dtype: jnp.dtype
    head_dim: int
    """Head size of queries and keys."""
    value_dim: int | None = None
    """Head dim of values, at most that of keys; None for the same."""
    query_heads: int
    kv_heads: int
    seq_len: int
    """Tokens of a row."""
    segment_slots: int
    """S of `PackedSegments`: 1 when every row is one segment."""
    long: bool = False
    """Most visible pairs are in long documents (`PackedSegments.long`)."""
    window: int | None = None
    forked: bool = False
    """Segments have several continuations of one beginning (`pack_forks`)."""
    softcap: float | None = None
    """Bound of the scores (Gemma 2)."""
    split: bool = False
    """Queries have bounds other than their own place: they are some of a row's tokens (`PackedSegments.split`), or see
    later keys of some of their segment (`PackedSegments.own_keys`)."""
    bidirectional: bool = False
    """Tokens see their whole segment, or all of a window around them (`PackedSegments.bidirectional`)."""
    sinks: bool = False
    """Each query head has a learned logit in the softmax's denominator (GPT-OSS)."""
    exact: bool = False
    """Sums over keys have one order (`packed_attention`)."""

    @property
    def narrow_values(self) -> bool:
        """Return whether values are narrower than keys."""
        return self.value_dim is not None and self.value_dim < self.head_dim

    def __post_init__(self):
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key/value heads, got {self.query_heads} and {self.kv_heads}"
            )


def _check_head_dim(call: AttentionCall, largest: int, least: int = 8) -> None:
    if not least <= call.head_dim <= largest or call.head_dim % 8:
        got = call.head_dim
        raise NotImplementedError(f"head dim must be a multiple of 8 from {least} to {largest}, got {got}")


def _check_uncapped(call: AttentionCall) -> None:
    if call.softcap is not None:
        raise NotImplementedError("scores are capped")


def _check_cudnn(capability: Capability | None, call: AttentionCall) -> None:
    check_capability(capability, HOPPER)
    _check_uncapped(call)
    _check_head_dim(call, 256)
    check_half(call.dtype)
    if call.forked:
        raise NotImplementedError("forked segments need another mask than causal")
    if call.split:
        raise NotImplementedError("queries are some of a row's tokens, or see later ones of some of their segment")
    if call.bidirectional:
        raise NotImplementedError("tokens see later ones of their segment")
    if call.segment_slots > _MOST_CUDNN_SLOTS:
        raise NotImplementedError(f"more than {_MOST_CUDNN_SLOTS} documents in a row: nobody has checked its results")


def _load_cudnn(_: Capability, call: AttentionCall) -> AttentionBackend:
    from jaxglue.ops.attention.cudnn import CudnnAttention

    return PaddedValues(CudnnAttention()) if call.narrow_values else CudnnAttention()


def _check_hopper(capability: Capability | None, call: AttentionCall) -> None:
    check_triton(capability, call.dtype)
    if capability is None or capability != HOPPER:
        got = ".".join(map(str, capability or ()))
        raise NotImplementedError(f"its instructions need compute capability 9.0, got {got}")
    if call.narrow_values and (call.head_dim, call.value_dim) != _LATENT_HEAD_DIMS:
        got = f"{call.head_dim} and {call.value_dim}"
        raise NotImplementedError(f"head dims of keys and values that differ must be {_LATENT_HEAD_DIMS}, got {got}")
    if not call.narrow_values and call.head_dim not in _HOPPER_HEAD_DIMS:
        raise NotImplementedError(f"head dim must be one of {_HOPPER_HEAD_DIMS}, got {call.head_dim}")
    if call.forked:
        raise NotImplementedError("forked segments need another mask than causal")


def _load_hopper(capability: Capability, call: AttentionCall) -> AttentionBackend:
    from jaxglue.ops.attention.hopper import HopperAttention

    return HopperAttention.of(capability)


def _check_triton(capability: Capability | None, call: AttentionCall) -> None:
    check_triton(capability, call.dtype)
    assert capability is not None
    _check_head_dim(call, largest_head_dim(capability), _NARROWEST)
    if call.exact and call.narrow_values:
        raise NotImplementedError("keys are wider than values, whose sums have no order in pages")


def _load_triton(capability: Capability, call: AttentionCall) -> AttentionBackend:
    from jaxglue.ops.attention.triton import TritonAttention

    long, window = (False, None) if call.exact else (call.long, call.window)
    tiles = kernel_tiles(capability, call.head_dim, value_dim=call.value_dim, window=window, long=long)
    return TritonAttention.of(capability, tiles=tiles, aligned=call.exact)


def _order(call: AttentionCall) -> tuple[str, ...]:
    reach = math.inf if call.window is None else call.window
    unbounded, wide = reach >= LONG_DOCUMENT, call.head_dim > 64
    suits = reach >= _HOPPER_WINDOW if wide else unbounded and call.seq_len >= _NARROW_ROW
    if not (call.long and suits):
        return "triton", "cudnn", "hopper"
    few = wide and unbounded and call.segment_slots <= FEW_DOCUMENTS and not call.bidirectional
    if few and call.head_dim > 128 and not call.narrow_values:
        return "cudnn", "hopper", "triton"  # faster backward, where nothing is to be skipped
    return ("hopper", "cudnn", "triton") if few else ("hopper", "triton", "cudnn")


_SIZES = "dtype", "head_dim", "value_dim", "query_heads", "kv_heads", "seq_len", "segment_slots", "long"

ATTENTION = Operation(
    name="attention",
    backends={
        "cudnn": Backend(
            check=_check_cudnn,
            load=_load_cudnn,
            advantage="few long documents leave nothing to skip",
            reads={AttentionCall: (*_SIZES, "window", "bidirectional", "sinks")},
        ),
        "hopper": Backend(
            check=_check_hopper,
            load=_load_hopper,
            advantage="long documents keep the tensor cores busy",
            reads={AttentionCall: (*_SIZES, "window", "softcap", "split", "bidirectional", "sinks")},
        ),
        "triton": Backend(
            check=_check_triton,
            load=_load_triton,
            advantage="skips tiles outside of segments and windows",
            reads={AttentionCall: (*_SIZES, "window", "forked", "softcap", "split", "bidirectional", "sinks", "exact")},
        ),
    },
    order=_order,
)


def packed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K values"],
    segments: PackedSegments,
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    exact: bool = False,
    backend: str = "auto",
) -> Float[Array, "B T N values"]:
    """Compute attention, with scores over √H, inside each segment; padding gives zeros and gets no gradient.

    It is causal, but for `PackedSegments.bidirectional`.

    Tokens of images see later ones where the segments say so (`PackedSegments.own_keys`).

    Of rows that are split over devices, the keys and values of all are gathered for this one's queries.

    Under `jax.checkpoint`, a policy that saves `ATTENTION_OUT` and `ATTENTION_LSE` runs the forward kernel once.

    Args:
        q, k, v: N query heads share K key/value heads (N a multiple of K), head dim H; that of values may be smaller.
        segments: bounds of the segments.
        window: tokens visible to a query, itself included; None for all.
        sinks: one learned logit per query head in the softmax's denominator (GPT-OSS).
        softcap: c of scores c·tanh(score / c) (Gemma 2); None for none.
        exact: sum over keys in the order of `paged_attention` with `forks`, whose bits a query then has: in tiles of
            `key_tile` keys, at whose multiples all parts of the segments begin (`pack_forks`).
        backend: one of `jaxglue.ops.choices.Attention`; see `ATTENTION.choose`.

    Raises:
        ValueError: arguments that do not fit together, or a named backend that cannot serve them.
    """
    _check(q, k, v, segments, window, sinks)
    call = replace(_call(q, k, v, segments, window, softcap, sinks), exact=exact)
    kernels = ATTENTION.load(call, backend=backend)
    if kernels is None and exact:
        options: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap}
        return checkpoint_name(tiled_attention(q, k, v, segments, **options), ATTENTION_OUT)
    segments, window = as_kernels_read(segments, window)
    return _attend(kernels, q, k, v, sinks, segments, window, softcap)


def rotated_attention(
    rotation: Rotation,
    z: Float[Array, "B T heads H"],
    segments: PackedSegments,
    *,
    window: int | None = None,
    backend: str = "auto",
) -> Float[Array, "B T N H"]:
    """Compute `packed_attention` of z's first heads as queries and keys, once rotated, and its last ones as values.

    Only z gets a gradient.
    """
    assert segments.split is None
    B, T, _, H = z.shape
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), z.dtype) for heads in rotation.heads)
    _check(q, k, k, segments, window, None)
    kernels = ATTENTION.load(_call(q, k, k, segments, window), backend=backend)
    turns = not segments.bidirectional
    segments, window = as_kernels_read(segments, window)
    if turns and kernels is not None and hasattr(kernels, "rotated_backward") and H == _ROTATED_HEAD_DIM:
        return rotated_flash_attention(FlashSpec(backend=kernels, window=window), rotation, z, segments)
    queries, keys, z = rotated_heads(rotation, z)
    values = z if getattr(kernels, "reads_joined_values", False) else z[:, :, -rotation.heads[1] :]
    return _attend(kernels, queries, keys, values, None, segments, window)


def _attend(
    kernels: AttentionBackend | None,
    q,
    k,
    v,
    sinks,
    segments: PackedSegments,
    window: int | None,
    softcap: float | None = None,
) -> Array:
    if kernels is None:
        if segments.split is not None:
            k, v = (whole_rows(x, segments.split) for x in (k, v))
            segments, window = bounds(segments, window), None
        out = reference_attention(q, k, v, segments, window=window, sinks=sinks, softcap=softcap)
        return checkpoint_name(out, ATTENTION_OUT)
    kernels = kernels if segments.split is None else SplitAttention(kernels)
    return flash_attention(FlashSpec(backend=kernels, window=window, softcap=softcap), q, k, v, sinks, segments)


def _call(
    q: _Shaped,
    k: _Shaped,
    v: _Shaped,
    segments: PackedSegments,
    window: int | None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> AttentionCall:
    return AttentionCall(
        dtype=q.dtype,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        query_heads=q.shape[2],
        kv_heads=k.shape[2],
        seq_len=q.shape[1] if segments.split is None else segments.split.stops.shape[1],
        segment_slots=segments.slots,
        long=segments.long,
        window=window,
        forked=segments.gap_starts is not None,
        softcap=softcap,
        split=segments.split is not None or segments.own_keys is not None,
        bidirectional=segments.bidirectional,
        sinks=sinks is not None,
    )


def _check(q, k, v, segments, window, sinks) -> None:
    if q.ndim != 4:
        raise ValueError(f"q must be [B, T, N, H], got shape {q.shape}")
    B, T, N, H = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (B, T, H):
        raise ValueError(f"k must be [B, T, K, H] = [{B}, {T}, K, {H}] to fit q, got shape {k.shape}")
    if v.shape[:-1] != k.shape[:-1] or v.shape[-1] > k.shape[-1]:
        raise ValueError(f"v must have k's shape {k.shape}, or narrower heads, got {v.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if segments.starts.shape != (B, T):
        raise ValueError(f"segments must be for [B, T] = [{B}, {T}] tokens, got {segments.starts.shape}")
    if window is not None and (window < 1 or window != int(window)):
        raise ValueError(f"window must be a whole number from 1 or None, got {window}")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"sinks must have one value for each of the {N} query heads, got shape {sinks.shape}")
