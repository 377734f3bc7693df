"""The cuDNN backend; the only file that uses JAX's private entry point for packed rows."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Float, Int

from jaxglue.ops.attention.vjp import Gradients
from jaxglue.ops.segments import PackedSegments

_LAYOUT = "BTNH"


@dataclass(frozen=True)
class CudnnAttention:
    """`AttentionBackend` by cuDNN ≥ 9 on Hopper and newer; lse is [B·S, N, T], T tokens for each segment slot."""

    def forward(self, q, k, v, sinks, segments, *, window, softcap=None):
        """Return (out, lse)."""
        assert softcap is None
        lengths, offsets = _ragged(segments)
        out, lse = fused.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
            scale=q.shape[3] ** -0.5, mask_type=fused.MaskType.PADDING_CAUSAL, sliding_window_length=window,
            qkv_layout=_LAYOUT, return_residual=True,
        )  # fmt: skip
        if sinks is not None:
            out, lse = _add_sinks(out, lse, sinks, segments)
        return _without_padding(out, segments), lse

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window, softcap=None) -> Gradients:
        """Return (dq, dk, dv, dsinks); cuDNN needs no sinks, for `out` and `lse` include them."""
        lengths, offsets = _ragged(segments)
        unused = jnp.zeros(0, q.dtype)
        offsets = unused if offsets is None else offsets
        residuals = (q, k, v, unused, lengths, lengths, offsets, offsets, unused, unused, lse, out)
        dq, dk, dv, *_ = fused._dot_product_attention_bwd_rule(
            q.shape[3] ** -0.5, 42, 0.0, (False, False), fused.MaskType.PADDING_CAUSAL,
            fused.AttentionLayout.BTNH.value, window, fused.check_cudnn_version(), False, residuals, dout,
        )  # fmt: skip
        dq, dk, dv = (_without_padding(x, segments) for x in (dq, dk, dv))
        return dq, dk, dv, None if sinks is None else _sink_gradient(sinks, lse, out, dout, segments)


def _ragged(segments: PackedSegments) -> tuple[Int[Array, "..."], Int[Array, "B S+1"] | None]:
    """Return lengths and offsets of the segments in JAX's form: −1 in unused slots, no offsets for a single slot."""
    bounds = segments.cu_seqlens
    lengths = bounds[:, 1:] - bounds[:, :-1]
    if lengths.shape[1] == 1:
        return lengths[:, 0], None
    used = lengths > 0
    offsets = jnp.pad(jnp.where(used, bounds[:, :-1], -1), ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(used, lengths, -1), offsets


def _without_padding(x: Float[Array, "B T N H"], segments: PackedSegments) -> Float[Array, "B T N H"]:
    """Set padding, which cuDNN leaves unwritten, to zero."""
    return jnp.where(segments.segment_ids[:, :, None, None] > 0, x, 0)


def _token_lse(lse: Float[Array, "BS N T"], segments: PackedSegments) -> Float[Array, "B T N"]:
    """Return the lse of each token; cuDNN numbers the used slots of all rows consecutively."""
    used = (segments.cu_seqlens[:, 1:] > segments.cu_seqlens[:, :-1]).sum(1)
    slot = jnp.maximum((jnp.cumsum(used) - used)[:, None] + segments.segment_ids - 1, 0)
    return lse[slot, :, segments.positions]


def _add_sinks(out, lse, sinks, segments):
    sinks = sinks.astype(jnp.float32)
    with_sinks = jnp.logaddexp(lse, sinks[:, None])
    share = jnp.exp(_token_lse(lse - with_sinks, segments))
    return (out * share[..., None]).astype(out.dtype), with_sinks


def _sink_gradient(sinks, lse, out, dout, segments) -> Float[Array, " N"]:
    """Compute −Σ exp(sink − lse)·(dout·out): a sink is a key with value zero; padding has out 0."""
    weight = jnp.exp(sinks.astype(jnp.float32) - _token_lse(lse, segments))
    weight = jnp.where(segments.segment_ids[:, :, None] > 0, weight, 0.0)
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    return -(weight * delta).sum((0, 1)).astype(sinks.dtype)
