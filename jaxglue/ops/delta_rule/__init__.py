"""The gated delta rule (arXiv 2412.06464) over packed documents, and the operations of its layer around it.

Every state begins empty at a document's first token, so a document's outputs do not depend on its neighbors.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxglue.ops.backend import HOPPER, Backend, Capability, Operation, Reads, check_triton
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.delta_rule.convolution import fused_convolution, reference_convolution
from jaxglue.ops.delta_rule.forks import with_copies
from jaxglue.ops.delta_rule.gated_norm import fused_gated_norm, reference_gated_norm
from jaxglue.ops.delta_rule.reference import DeltaHeads, gates, normalize, reference_delta_rule
from jaxglue.ops.delta_rule.split import SplitDeltaRule, exchanged, outputs, own_heads
from jaxglue.ops.delta_rule.states import (
    DeltaStates,
    convolution_step,
    convolve_each,
    delta_step,
    following,
    last_inputs,
    last_states,
    make_states,
)
from jaxglue.ops.delta_rule.vjp import DeltaSpec, fused_delta_rule
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.row_split import to_heads, whole_segments
from jaxglue.ops.segments import PackedSegments

if TYPE_CHECKING:
    from jaxglue.ops.delta_rule.triton import TritonConvolutionStep, TritonDeltaRows, TritonDeltaStep

__all__ = [
    "CONVOLUTION_STEP",
    "DELTA_ROWS",
    "DELTA_RULE",
    "DELTA_STEP",
    "DeltaCall",
    "DeltaHeads",
    "DeltaRowsCall",
    "DeltaStates",
    "advance_rows",
    "advance_states",
    "causal_convolution",
    "convolution_step",
    "convolve_rows",
    "delta_rule_and_states",
    "gated_delta_rule",
    "gated_rms_norm",
    "gates",
    "last_inputs",
    "make_states",
    "reference_delta_rule",
]

_HEAD_DIMS = (64, 128)


@dataclass(frozen=True, kw_only=True)
class DeltaCall:
    """Meaning of a delta rule over rows, or of its step."""

    dtype: jnp.dtype
    key_dim: int
    value_dim: int


def _check_hopper(capability: Capability | None, dtype) -> None:
    check_triton(capability, dtype)
    if capability != HOPPER:
        got = ".".join(map(str, capability or ()))
        raise NotImplementedError(f"its kernels are checked on compute capability 9.0 alone, got {got}")


@dataclass(frozen=True, kw_only=True)
class DeltaRowsCall:
    """Meaning of a convolution over the tokens of documents, or of a gated norm of heads."""

    dtype: jnp.dtype
    taps: int = 4
    """Of the convolution."""


def _check_triton(capability: Capability | None, call: DeltaCall) -> None:
    _check_hopper(capability, call.dtype)
    if not {call.key_dim, call.value_dim} <= set(_HEAD_DIMS):
        raise NotImplementedError(f"head dims must be of {_HEAD_DIMS}, got {call.key_dim} and {call.value_dim}")


def _load_triton(capability: Capability, call: DeltaCall) -> Any:
    from jaxglue.ops.delta_rule.triton import TritonDeltaRule

    return TritonDeltaRule.of(capability)


def _check_rows(capability: Capability | None, call: DeltaRowsCall) -> None:
    _check_hopper(capability, call.dtype)
    if call.taps != 4:
        raise NotImplementedError(f"convolutions must have 4 taps, got {call.taps}")


def _load_rows(capability: Capability, call: DeltaRowsCall) -> "TritonDeltaRows":
    from jaxglue.ops.delta_rule.triton import TritonDeltaRows

    return TritonDeltaRows.of(capability)


def _serves_anywhere(capability: Capability | None, call: DeltaCall) -> None:
    """Find no obstacle."""


_READS: Reads = {DeltaCall: ("dtype", "key_dim", "value_dim")}

DELTA_RULE = Operation(
    name="delta rule",
    backends={
        "triton": Backend(check=_check_triton, load=_load_triton, advantage="documents run in parallel", reads=_READS),
        "chunked": Backend(
            check=_serves_anywhere,
            load=lambda capability, call: ChunkedDeltaRule(),
            advantage="tokens of a chunk are multiplied together",
            reads=_READS,
            anywhere=True,
        ),
    },
)
DELTA_ROWS = Operation(
    name="convolution and gated norm",
    backends={
        "triton": Backend(
            check=_check_rows,
            load=_load_rows,
            advantage="values are read and written once",
            reads={DeltaRowsCall: {"dtype": None, "taps": (4,)}},
        )
    },
)


def _load_step(capability: Capability, call: DeltaCall) -> "TritonDeltaStep":
    from jaxglue.ops.delta_rule.triton import TritonDeltaStep

    return TritonDeltaStep.of(capability)


DELTA_STEP = Operation(
    name="step of the delta rule",
    backends={
        "triton": Backend(
            check=_check_triton, load=_load_step, advantage="states are read and written once", reads=_READS
        )
    },
)


def _load_convolution(capability: Capability, call: DeltaRowsCall) -> "TritonConvolutionStep":
    from jaxglue.ops.delta_rule.triton import TritonConvolutionStep

    return TritonConvolutionStep.of(capability)


CONVOLUTION_STEP = Operation(
    name="step of a convolution",
    backends={
        "triton": Backend(
            check=_check_rows,
            load=_load_convolution,
            advantage="inputs are read and written once, in place",
            reads={DeltaRowsCall: {"dtype": None, "taps": (4,)}},
        )
    },
)


def gated_delta_rule(
    qkv: Float[Array, "B T W"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    segments: PackedSegments,
    heads: DeltaHeads,
    *,
    backend: str = "auto",
) -> Float[Array, "B T N V"]:
    """Read and write a state S [H, V] per value head, in the order of a document's tokens.

    With q and k of unit length, q also over √H: S ← exp(g)·S; S ← S + k ⊗ β(v − Sᵀk); out = Sᵀq. S is float32 and 0 at
    each document's first token. Padding's outputs are 0. Value head n uses queries and keys of head ⌊n·K/N⌋.

    Under `jax.checkpoint`, a policy that saves `ATTENTION_OUT` computes the outputs once.

    Args:
        qkv: queries and keys [K, H] of any length, and values [N, V], side by side for each token. Of rows split over
            devices, whole rows of this device's heads, as `causal_convolution` returns them.
        g: logarithm of each token's decay, at most 0; float32, see `gates`.
        beta: step size of each token's update.
        segments: the rows' documents.
        heads: of qkv.
        backend: `auto`, `reference`, `chunked` or `triton`; see `DELTA_RULE.choose`.

    Raises:
        ValueError: shapes or dtypes that do not fit, forked segments, or a named backend that cannot serve.
    """
    local_heads, split = heads, segments.split
    if split is None:
        _check(qkv, g, beta, segments, heads)
    else:
        local_heads = own_heads(heads)
    call = DeltaCall(dtype=qkv.dtype, key_dim=heads.key_dim, value_dim=local_heads.value_dim(qkv.shape[-1]))
    rule: Any = DELTA_RULE.load(call, backend=backend) or reference_delta_rule
    if split is not None and not hasattr(rule, "prepare"):
        g, beta = (to_heads(gate, split) for gate in (g, beta))
        out = rule(*local_heads.split(qkv), g, beta, whole_segments(segments))
        return checkpoint_name(outputs(out, segments), ATTENTION_OUT)
    rule = rule if split is None else SplitDeltaRule(rule)
    forked = segments.copies is not None

    def compute(segments: PackedSegments, qkv, g, beta) -> Array:
        if hasattr(rule, "prepare"):
            return fused_delta_rule(DeltaSpec(backend=rule, heads=heads, named=not forked), qkv, g, beta, segments)
        return rule(*heads.split(qkv), g, beta, segments)

    if forked:
        return checkpoint_name(with_copies(compute, segments, qkv, g, beta), ATTENTION_OUT)
    out = compute(segments, qkv, g, beta)
    return out if hasattr(rule, "prepare") else checkpoint_name(out, ATTENTION_OUT)


def delta_rule_and_states(
    qkv: Float[Array, "B T W"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    segments: PackedSegments,
    heads: DeltaHeads,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B S N H V"]]:
    """Return `gated_delta_rule` and the state behind each document in float32, without gradients.

    Raises:
        ValueError: as `gated_delta_rule`.
    """
    _check(qkv, g, beta, segments, heads)
    q, k, v = heads.split(qkv)
    keys = normalize(q, k)[1]
    call = DeltaCall(dtype=qkv.dtype, key_dim=heads.key_dim, value_dim=v.shape[-1])
    rule: Any = DELTA_RULE.load(call) or ChunkedDeltaRule()
    if hasattr(rule, "prepare"):
        prepared = rule.prepare(qkv, g, beta, segments, heads, dtype=jnp.float32)
        out, updates, states = rule.forward(qkv, prepared, segments, heads), prepared.updates, prepared.states
        states = states.swapaxes(1, 2)
    else:
        out, updates, states = rule.with_states(q, k, v, g, beta, segments)
    return out, last_states(keys, g, updates, states, segments, rule.chunk)


def causal_convolution(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C 1 W"],
    segments: PackedSegments,
    heads: DeltaHeads | None = None,
    *,
    bias: Float[Array, " C"] | None = None,
    backend: str = "auto",
) -> Float[Array, "B T C"]:
    """Return silu of the sum over the last W tokens of a document, each channel by its weights, and bias, in x's dtype.

    Sums are in float32; tokens before a document's first are zeros, and so is padding's result. The backward pass
    computes the sums again. Of rows split over devices, the result is whole rows of this device's part of the heads.

    Args:
        x: packed rows.
        weight: the last of a channel's is the token's own, as torch's `Conv1d` with groups of one channel stores them.
        segments: the rows' documents.
        heads: whose channels x has; needed only where rows are split.
        bias: of each channel; None for none.
        backend: `auto`, `reference` or `triton`; see `DELTA_ROWS.choose`.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    if weight.ndim != 3 or weight.shape[:2] != (x.shape[-1], 1):
        raise ValueError(f"weight must be [C, 1, W] with C = {x.shape[-1]} channels of x, got shape {weight.shape}")
    if x.ndim != 3 or segments.segment_ids.shape != x.shape[:2]:
        raise ValueError(f"x must be [B, T, C] with rows {segments.segment_ids.shape}, got shape {x.shape}")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias must be of {x.shape[-1]} channels, as x, got shape {bias.shape}")
    kernels = DELTA_ROWS.load(DeltaRowsCall(dtype=x.dtype, taps=weight.shape[2]), backend=backend)
    if segments.split is not None:
        assert heads is not None and bias is None
        x, weight = exchanged(x, weight, segments, heads)
        segments = whole_segments(segments)

    def compute(segments: PackedSegments, x) -> Array:
        if kernels is None:
            return reference_convolution(x, weight, bias, segments)
        return fused_convolution(kernels, x, weight, bias, segments)

    return compute(segments, x) if segments.copies is None else with_copies(compute, segments, x)


def gated_rms_norm(
    x: Float[Array, "*B V"],
    gate: Float[Array, "*B V"],
    weight: Float[Array, " V"],
    eps: float,
    *,
    backend: str = "auto",
) -> Float[Array, "*B V"]:
    """Return silu(gate) · `rms_norm`(x) in x's dtype, the gate's product in float32.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    if gate.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"gate must be {x.shape} and weight {x.shape[-1:]} as x, got {gate.shape} and {weight.shape}")
    kernels = DELTA_ROWS.load(DeltaRowsCall(dtype=x.dtype), backend=backend)
    if kernels is None:
        return reference_gated_norm(x, gate, weight, eps)
    return fused_gated_norm(kernels, eps, x, gate, weight)


def _check(qkv, g, beta, segments: PackedSegments, heads: DeltaHeads) -> None:
    if heads.values % heads.keys:
        raise ValueError(f"value heads must be a multiple of key heads, got {heads.values} and {heads.keys}")
    rest = qkv.shape[-1] - 2 * heads.keys * heads.key_dim
    if qkv.ndim != 3 or rest <= 0 or rest % heads.values:
        raise ValueError(f"qkv must be [B, T, 2·K·H + N·V] with {heads}, got shape {qkv.shape}")
    gates = *qkv.shape[:2], heads.values
    if not g.shape == beta.shape == gates or g.dtype != jnp.float32:
        raise ValueError(f"g and beta must be {gates} to fit qkv, g float32, got {g.shape} {g.dtype} and {beta.shape}")
    if segments.segment_ids.shape != qkv.shape[:2]:
        raise ValueError(f"segments are of rows {segments.segment_ids.shape}, and qkv of {qkv.shape[:2]}")
    if segments.gap_starts is not None and segments.copies is None:
        raise ValueError("segments fork, and a state follows one continuation: add copies of their beginnings")


def advance_states(
    states: Float[Array, "slots N H V"],
    slots: Int[Array, " S"],
    begun: Bool[Array, " S"],
    qkv: Float[Array, "S W"],
    g: Float[Array, "S N"],
    beta: Float[Array, "S N"],
    heads: DeltaHeads,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "S N V"], Float[Array, "slots N H V"]]:
    """Return `gated_delta_rule`'s outputs of a token of each sequence, and the states of all slots behind them.

    Args:
        states: of all slots, float32.
        slots: of the sequences; a slot that several share has any of their states afterwards.
        begun: False for sequences whose first token this is, whatever is in their slot.
        qkv, g, beta, heads: of the tokens, as `gated_delta_rule`'s.
        backend: `auto`, `reference` or `triton`; see `DELTA_STEP.choose`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    call = DeltaCall(dtype=qkv.dtype, key_dim=heads.key_dim, value_dim=states.shape[-1])
    kernel = DELTA_STEP.load(call, backend=backend)
    if kernel is not None:
        return kernel(states, slots, begun, qkv, g, beta, heads)
    before = jnp.where(begun[:, None, None, None], states[slots], 0.0)
    out, after = delta_step(qkv, g, beta, before, heads)
    return out, states.at[slots].set(after)


def advance_rows(
    states: Float[Array, "slots N H V"],
    slots: Int[Array, " S"],
    begun: Bool[Array, " S"],
    kept: tuple[Float[Array, "S K W"], Float[Array, "S K N"], Float[Array, "S K N"]],
    counts: Int[Array, " S"],
    tokens: tuple[Float[Array, "S R W"], Float[Array, "S R N"], Float[Array, "S R N"]],
    heads: DeltaHeads,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "S R N V"], Float[Array, "slots N H V"]]:
    """Return `gated_delta_rule`'s outputs of several tokens of each sequence, and the states before them.

    Tokens that a later step refuses need no state of theirs taken back: those that it accepts are `kept` there.

    Args:
        states: of all slots, float32, before the kept tokens.
        slots: of the sequences; a slot that several share has any of their states afterwards.
        begun: False for sequences without a token before the kept ones, whatever is in their slot.
        kept: qkv, g and beta, as `gated_delta_rule`'s, of tokens before.
        counts: of the kept tokens that count, the first ones.
        tokens: qkv, g and beta of those whose outputs are wanted; there may be none.
        heads: of the tokens.
        backend: `auto`, `reference` or `triton`; see `DELTA_STEP.choose`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    call = DeltaCall(dtype=tokens[0].dtype, key_dim=heads.key_dim, value_dim=states.shape[-1])
    kernel = DELTA_STEP.load(call, backend=backend)
    if kernel is not None:
        return kernel.rows(states, slots, begun, kept, counts, tokens, heads)
    state = jnp.where(begun[:, None, None, None], states[slots], 0.0)
    for row, (qkv, g, beta) in enumerate(zip(*(jnp.unstack(x, axis=1) for x in kept), strict=True)):
        _, after = delta_step(qkv, g, beta, state, heads)
        state = jnp.where((row < counts)[:, None, None, None], after, state)
    states, outputs = states.at[slots].set(state), []
    for qkv, g, beta in zip(*(jnp.unstack(x, axis=1) for x in tokens), strict=True):
        out, state = delta_step(qkv, g, beta, state, heads)
        outputs.append(out)
    wanted = jnp.zeros((len(slots), 0, *states.shape[1::2]), tokens[0].dtype)
    return jnp.stack(outputs, axis=1) if outputs else wanted, states


def convolve_rows(
    inputs: Float[Array, "slots W-1 C"],
    slots: Int[Array, " S"],
    begun: Bool[Array, " S"],
    x: Float[Array, "S R C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None = None,
    *,
    kept: Float[Array, "S K C"] | None = None,
    counts: Int[Array, " S"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "S R C"], Float[Array, "slots W-1 C"]]:
    """Return `causal_convolution` of each sequence's next tokens, and the last inputs of all slots.

    Args:
        inputs: of all slots.
        slots, begun: as of `advance_states`.
        x: the tokens; behind kept ones there may be none.
        weight, bias: as of `causal_convolution`.
        kept: tokens before, of which some count, as of `advance_rows`: the inputs returned then end with these.
        counts: of the kept tokens that count.
        backend: `auto`, `reference` or `triton`; see `CONVOLUTION_STEP.choose`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    kernel = CONVOLUTION_STEP.load(DeltaRowsCall(dtype=x.dtype, taps=weight.shape[2]), backend=backend)
    if kernel is not None:
        return kernel(inputs, slots, begun, x, weight, bias, kept, counts)
    before = jnp.where(begun[:, None, None], inputs[slots], 0)
    if kept is not None:
        assert counts is not None
        before = following(before, kept, counts)
    out, after = convolve_each(x, before, weight, bias)
    return out, inputs.at[slots].set(after if kept is None else before)
