"""Kimi Delta Attention (arXiv 2510.26692) over packed documents: the gated delta rule with a decay for each channel.

Every state begins empty at a document's first token, so a document's outputs do not depend on its neighbors.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import HOPPER, Backend, Capability, Operation, Reads, check_tried, check_triton
from jaxglue.ops.delta_rule import causal_convolution, convolution_step, last_inputs
from jaxglue.ops.delta_rule.reference import DeltaHeads, normalize
from jaxglue.ops.delta_rule.split import own_heads
from jaxglue.ops.kda.chunks import ChunkedKDA
from jaxglue.ops.kda.reference import channel_decays, reference_kda
from jaxglue.ops.kda.states import kda_step, last_states
from jaxglue.ops.kda.vjp import kernel_kda
from jaxglue.ops.recurrence import Recurrence
from jaxglue.ops.row_split import to_heads, to_tokens, whole_segments
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.state_space.split import own_part

__all__ = ["KDA", "KDACall", "KDAWeights", "channel_decays", "kda_recurrence", "kimi_delta_attention", "reference_kda"]


@dataclass(frozen=True, kw_only=True)
class KDACall:
    """Meaning of the recurrence over rows."""

    dtype: jnp.dtype
    key_dim: int
    value_dim: int


def _check_triton(capability: Capability | None, call: KDACall) -> None:
    check_triton(capability, call.dtype)
    if capability != HOPPER:
        got = ".".join(map(str, capability or ()))
        raise NotImplementedError(f"its kernels are for compute capability 9.0 alone, got {got}")
    if not {call.key_dim, call.value_dim} <= {64, 128}:
        raise NotImplementedError(f"head dims must be 64 or 128, got {call.key_dim} and {call.value_dim}")
    check_tried("Kimi Delta Attention")


def _load_triton(capability: Capability, call: KDACall) -> Any:
    from jaxglue.ops.kda.triton import TritonKDA

    return TritonKDA.of(capability)


_READS: Reads = {KDACall: ("dtype", "key_dim", "value_dim")}


def _serves_anywhere(capability: Capability | None, call: KDACall) -> None:
    """Find no obstacle."""


KDA = Operation(
    name="Kimi Delta Attention",
    backends={
        "triton": Backend(check=_check_triton, load=_load_triton, advantage="documents run in parallel", reads=_READS),
        "chunked": Backend(
            check=_serves_anywhere,
            load=lambda capability, call: ChunkedKDA(),
            advantage="tokens of a chunk are multiplied together",
            reads=_READS,
            anywhere=True,
        ),
    },
)


def kimi_delta_attention(
    qkv: Float[Array, "B T W"],
    g: Float[Array, "B T N H"],
    beta: Float[Array, "B T N"],
    segments: PackedSegments,
    heads: DeltaHeads,
    *,
    backend: str = "auto",
) -> Float[Array, "B T N V"]:
    """Read and write a state S [H, V] per head, in the order of a document's tokens.

    With q and k of unit length, q also over √H: S ← diag(exp(g))·S; S ← S + k ⊗ β(v − Sᵀk); out = Sᵀq. S is float32 and
    0 at each document's first token. Padding's outputs are 0.

    Args:
        qkv: queries and keys [N, H] of any length, and values [N, V], side by side for each token.
        g: logarithm of each channel's decay, at most 0; float32, see `channel_decays`.
        beta: step size of each token's update.
        segments: whole rows' documents.
        heads: of qkv, as many of keys as of values.
        backend: `auto`, `reference`, `chunked` or `triton`; see `KDA.choose`.

    Raises:
        ValueError: shapes or dtypes that do not fit, forked segments, or a named backend that cannot serve.
    """
    _check(qkv, g, beta, segments, heads)
    call = KDACall(dtype=qkv.dtype, key_dim=heads.key_dim, value_dim=heads.value_dim(qkv.shape[-1]))
    rule: Any = KDA.load(call, backend=backend) or reference_kda
    if hasattr(rule, "backward"):
        return kernel_kda(rule, qkv, g, beta, segments, heads)
    return rule(qkv, g, beta, segments, heads)


def _check(qkv, g, beta, segments: PackedSegments, heads: DeltaHeads) -> None:
    if heads.values != heads.keys:
        raise ValueError(f"there must be as many heads of values as of keys, got {heads.values} and {heads.keys}")
    rest = qkv.shape[-1] - 2 * heads.keys * heads.key_dim
    if qkv.ndim != 3 or rest <= 0 or rest % heads.values:
        raise ValueError(f"qkv must be [B, T, 2·N·H + N·V] with {heads}, got shape {qkv.shape}")
    of_heads = *qkv.shape[:2], heads.values
    if g.shape != (*of_heads, heads.key_dim) or beta.shape != of_heads or g.dtype != jnp.float32:
        found = f"{g.shape} {g.dtype} and {beta.shape}"
        raise ValueError(f"g must be float32 of {(*of_heads, heads.key_dim)} and beta of {of_heads}, got {found}")
    if segments.segment_ids.shape != qkv.shape[:2]:
        raise ValueError(f"segments are of rows {segments.segment_ids.shape}, and qkv of {qkv.shape[:2]}")
    if segments.gap_starts is not None:
        raise ValueError("segments fork, and a state follows one continuation: use copies of their beginnings")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KDAWeights:
    """Parameters of the recurrence and of the convolution before it. A pytree."""

    convolution: Float[Array, "W 1 taps"]
    A_log: Float[Array, " N"]
    dt_bias: Float[Array, " N*H"]


def kda_recurrence(weights: KDAWeights, heads: DeltaHeads, least: float | None) -> Recurrence:
    """Return the recurrence of values (qkv, f, b): convolution and silu of qkv, decays of f, β = sigmoid(b).

    Its state is the convolution's last inputs and S; of rows split over devices, the results are this device's tokens'.

    Args:
        weights: of all heads.
        heads: of qkv.
        least: see `channel_decays`.
    """
    of_layer = weights, heads, least
    return Recurrence(partial(_whole, *of_layer), partial(_last, *of_layer), partial(_step, *of_layer))


def _gates(weights: KDAWeights, least, f, b) -> tuple[Array, Array]:
    return channel_decays(f, weights.A_log, weights.dt_bias, least), jax.nn.sigmoid(b)


def _whole(weights: KDAWeights, heads: DeltaHeads, least, segments: PackedSegments, qkv, f, b) -> Array:
    mixed = causal_convolution(qkv, weights.convolution, segments, heads)
    if segments.split is None:
        return kimi_delta_attention(mixed, *_gates(weights, least, f, b), segments, heads)
    own = KDAWeights(convolution=weights.convolution, A_log=own_part(weights.A_log), dt_bias=own_part(weights.dt_bias))
    gates = _gates(own, least, *(to_heads(x, segments.split) for x in (f, b)))
    out = kimi_delta_attention(mixed, *gates, whole_segments(segments), own_heads(heads))
    values = to_tokens(out.reshape(*out.shape[:2], -1), segments.split)
    return values.reshape(*values.shape[:2], heads.values, -1)


def _last(weights: KDAWeights, heads: DeltaHeads, least, segments: PackedSegments, qkv, f, b) -> dict[str, Array]:
    mixed = causal_convolution(qkv, weights.convolution, segments, heads)
    (g, beta), rule = _gates(weights, least, f, b), ChunkedKDA()
    _, updates, states = rule.with_states(mixed, g, beta, segments, heads)
    q, k, _ = heads.split(mixed)
    behind = last_states(normalize(q, k)[1], g, updates, states, segments, rule.chunk)
    return {"inputs": last_inputs(qkv, segments, weights.convolution.shape[2] - 1), "states": behind}


def _step(weights: KDAWeights, heads: DeltaHeads, least, states: dict[str, Array], qkv, f, b):
    mixed, inputs = convolution_step(qkv, states["inputs"], weights.convolution)
    g, beta = _gates(weights, least, f, b)
    out, after = kda_step(mixed, g, beta, states["states"], heads)
    return out, {"inputs": inputs, "states": after}
