"""Mamba-2 (arXiv 2405.21060) over packed documents: the gated delta rule without its delta term, and its layer's parts.

Every state begins empty at a document's first token, so a document's outputs do not depend on its neighbors.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxglue.ops.backend import HOPPER, Backend, Capability, Operation, Reads, check_triton
from jaxglue.ops.delta_rule import causal_convolution, convolve_rows, last_inputs
from jaxglue.ops.delta_rule.states import last_states
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.recurrence import Recurrence
from jaxglue.ops.row_split import to_heads, to_tokens, whole_segments
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.state_space.chunks import ChunkedStateSpace
from jaxglue.ops.state_space.reference import StateHeads, log_decays, reference_state_space, step_sizes
from jaxglue.ops.state_space.split import exchange_tokens, own_channels, own_heads, own_part, why_no_split
from jaxglue.ops.state_space.vjp import fused_gated_norm, fused_state_space, reference_gated_norm

if TYPE_CHECKING:
    from jaxglue.ops.state_space.triton import TritonGatedNorm, TritonStateStep

__all__ = [
    "GATED_NORM",
    "STATE_SPACE",
    "STATE_STEP",
    "GatedNormCall",
    "Mamba2Weights",
    "StateHeads",
    "StateSpaceCall",
    "advance_states",
    "gated_group_norm",
    "log_decays",
    "mamba2",
    "reference_state_space",
    "state_space",
    "state_space_and_states",
    "step_sizes",
    "why_no_split",
]

_STATE_DIMS, _VALUE_DIMS = (16, 32, 64, 128, 256), (32, 64, 128)
_MOST_NORMED = 16_384
"""Values of a group that one program holds."""


@dataclass(frozen=True, kw_only=True)
class StateSpaceCall:
    """Meaning of the recurrence over rows, or of its step."""

    dtype: jnp.dtype
    heads: StateHeads


@dataclass(frozen=True, kw_only=True)
class GatedNormCall:
    """Meaning of a gated norm of groups."""

    dtype: jnp.dtype
    width: int
    """Of a group."""


def _check_hopper(capability: Capability | None, dtype) -> None:
    check_triton(capability, dtype)
    if capability != HOPPER:
        got = ".".join(map(str, capability or ()))
        raise NotImplementedError(f"its kernels are checked on compute capability 9.0 alone, got {got}")


def _check_triton(capability: Capability | None, call: StateSpaceCall) -> None:
    _check_hopper(capability, call.dtype)
    heads = call.heads
    if heads.state_dim not in _STATE_DIMS or heads.value_dim not in _VALUE_DIMS:
        raise NotImplementedError(
            f"states must be of {_STATE_DIMS} by {_VALUE_DIMS} values, got {heads.state_dim} by {heads.value_dim}"
        )


def _load_triton(capability: Capability, call: StateSpaceCall) -> Any:
    from jaxglue.ops.state_space.triton import TritonStateSpace

    return TritonStateSpace.of(capability)


def _load_step(capability: Capability, call: StateSpaceCall) -> "TritonStateStep":
    from jaxglue.ops.state_space.triton import TritonStateStep

    return TritonStateStep.of(capability)


def _check_norm(capability: Capability | None, call: GatedNormCall) -> None:
    _check_hopper(capability, call.dtype)
    if call.width > _MOST_NORMED:
        raise NotImplementedError(f"groups must have at most {_MOST_NORMED} values, got {call.width}")


def _load_norm(capability: Capability, call: GatedNormCall) -> "TritonGatedNorm":
    from jaxglue.ops.state_space.triton import TritonGatedNorm

    return TritonGatedNorm.of(capability)


def _serves_anywhere(capability: Capability | None, call: StateSpaceCall) -> None:
    """Find no obstacle."""


_READS: Reads = {StateSpaceCall: ("dtype", "heads"), StateHeads: ("values", "value_dim", "groups", "state_dim")}

STATE_SPACE = Operation(
    name="Mamba-2",
    backends={
        "triton": Backend(check=_check_triton, load=_load_triton, advantage="documents run in parallel", reads=_READS),
        "chunked": Backend(
            check=_serves_anywhere,
            load=lambda capability, call: ChunkedStateSpace(),
            advantage="tokens of a chunk are multiplied together",
            reads=_READS,
            anywhere=True,
        ),
    },
)
STATE_STEP = Operation(
    name="step of Mamba-2",
    backends={
        "triton": Backend(
            check=_check_triton, load=_load_step, advantage="states are read and written once", reads=_READS
        )
    },
)
GATED_NORM = Operation(
    name="gated norm of groups",
    backends={
        "triton": Backend(
            check=_check_norm,
            load=_load_norm,
            advantage="values are read and written once",
            reads={GatedNormCall: ("dtype", "width")},
        )
    },
)


def state_space(
    xbc: Float[Array, "B T W"],
    step: Float[Array, "B T N"],
    g: Float[Array, "B T N"],
    skip: Float[Array, " N"],
    segments: PackedSegments,
    heads: StateHeads,
    *,
    backend: str = "auto",
) -> Float[Array, "B T N P"]:
    """Read and write a state H [S, P] per head, in the order of a document's tokens.

    H ← exp(g)·H + b ⊗ Δx; out = Hᵀc + D·x. H is float32 and 0 at each document's first token. Padding's outputs are 0.

    Args:
        xbc: x, B and C side by side for each token.
        step: Δ, float32; see `step_sizes`.
        g: logarithm of each token's decay, at most 0; float32, see `log_decays`.
        skip: D.
        segments: whole rows' documents.
        heads: of xbc.
        backend: `auto`, `reference`, `chunked` or `triton`; see `STATE_SPACE.choose`.

    Raises:
        ValueError: shapes or dtypes that do not fit, forked segments, or a named backend that cannot serve.
    """
    _check(xbc, step, g, segments, heads)
    rule: Any = STATE_SPACE.load(StateSpaceCall(dtype=xbc.dtype, heads=heads), backend=backend)
    if hasattr(rule, "prepare"):
        return fused_state_space(rule, heads, xbc, step, g, skip, segments)
    return (rule or reference_state_space)(xbc, step, g, skip, segments, heads)


def state_space_and_states(
    xbc: Float[Array, "B T W"],
    step: Float[Array, "B T N"],
    g: Float[Array, "B T N"],
    skip: Float[Array, " N"],
    segments: PackedSegments,
    heads: StateHeads,
) -> tuple[Float[Array, "B T N P"], Float[Array, "B D N S P"]]:
    """Return `state_space` and the state behind each document in float32, without gradients.

    Raises:
        ValueError: as `state_space`.
    """
    _check(xbc, step, g, segments, heads)
    rule: Any = STATE_SPACE.load(StateSpaceCall(dtype=xbc.dtype, heads=heads)) or ChunkedStateSpace()
    if hasattr(rule, "prepare"):
        prepared = rule.prepare(xbc, step, g, segments, heads, dtype=jnp.float32)
        out, states = rule.forward(xbc, skip, prepared, segments, heads), prepared.states.swapaxes(1, 2)
    else:
        out, states = rule.with_states(xbc, step, g, skip, segments, heads)
    x, b, _ = heads.split(xbc)
    written = step[..., None] * x.astype(jnp.float32)
    return out, last_states(b.astype(jnp.float32), g, written, states, segments, rule.chunk)


def _check(xbc, step, g, segments: PackedSegments, heads: StateHeads) -> None:
    if heads.values % heads.groups:
        raise ValueError(f"heads must be a multiple of groups, got {heads.values} and {heads.groups}")
    if xbc.ndim != 3 or xbc.shape[-1] != heads.width:
        raise ValueError(f"xbc must be [B, T, {heads.width}] with {heads}, got shape {xbc.shape}")
    of_heads = *xbc.shape[:2], heads.values
    if not step.shape == g.shape == of_heads or not step.dtype == g.dtype == jnp.float32:
        found = f"{step.shape} {step.dtype} and {g.shape} {g.dtype}"
        raise ValueError(f"step and g must be float32 of {of_heads} to fit xbc, got {found}")
    if segments.segment_ids.shape != xbc.shape[:2]:
        raise ValueError(f"segments are of rows {segments.segment_ids.shape}, and xbc of {xbc.shape[:2]}")
    if segments.gap_starts is not None:
        raise ValueError("segments fork, and a state follows one continuation: use copies of their beginnings")


def advance_states(
    states: Float[Array, "slots N S P"],
    slots: Int[Array, " M"],
    begun: Bool[Array, " M"],
    xbc: Float[Array, "M W"],
    step: Float[Array, "M N"],
    g: Float[Array, "M N"],
    skip: Float[Array, " N"],
    heads: StateHeads,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "M N P"], Float[Array, "slots N S P"]]:
    """Return `state_space`'s outputs of a token of each sequence, and the states of all slots behind them.

    Args:
        states: of all slots, float32.
        slots: of the sequences; a slot that several share has any of their states afterwards.
        begun: False for sequences whose first token this is, whatever is in their slot.
        xbc, step, g, skip, heads: of the tokens, as `state_space`'s.
        backend: `auto`, `reference` or `triton`; see `STATE_STEP.choose`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    kernel = STATE_STEP.load(StateSpaceCall(dtype=xbc.dtype, heads=heads), backend=backend)
    if kernel is not None:
        return kernel(states, slots, begun, xbc, step, g, skip, heads)
    before = jnp.where(begun[:, None, None, None], states[slots], 0.0)
    x, b, c = (y[:, 0].astype(jnp.float32) for y in heads.split(xbc[:, None]))
    b, c = (jnp.repeat(y, heads.values // heads.groups, axis=1) for y in (b, c))
    written = (step[..., None] * x)[:, :, None, :]
    after = jnp.exp(g)[..., None, None] * before + b[..., None] * written
    out = jnp.einsum("mnsp,mns->mnp", after, c, precision=lax.Precision.HIGHEST)
    out += skip.astype(jnp.float32)[:, None] * x
    return out.astype(xbc.dtype), states.at[slots].set(after)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Mamba2Weights:
    """Parameters of the recurrence and of the convolution before it. A pytree."""

    convolution: Float[Array, "W 1 taps"]
    bias: Float[Array, " W"] | None
    """Of the convolution."""
    A_log: Float[Array, " N"]
    dt_bias: Float[Array, " N"]
    skip: Float[Array, " N"]
    """D."""


def mamba2(
    weights: Mamba2Weights, heads: StateHeads, limits: tuple[float, float], name: str = ATTENTION_OUT
) -> Recurrence:
    """Return the recurrence of values (xbc, dt): convolution and silu of xbc, step sizes from dt, and `state_space`.

    Its state is the convolution's last inputs and H; of rows split over devices, the results are this device's tokens'.

    Args:
        weights: of all heads.
        heads: of xbc.
        limits: of step sizes.
        name: of the outputs, for checkpoint policies.
    """
    return Recurrence(
        partial(_whole, weights, heads, limits),
        partial(_last, weights, heads, limits),
        partial(_step, weights, heads, limits),
        partial(_advance, weights, heads, limits),
        name,
    )


def _gates(weights: Mamba2Weights, limits, dt) -> tuple[Array, Array]:
    step = step_sizes(dt, weights.dt_bias, limits)
    return step, log_decays(step, weights.A_log)


def _whole(weights: Mamba2Weights, heads: StateHeads, limits, segments: PackedSegments, xbc, dt) -> Array:
    if segments.split is None:
        mixed = causal_convolution(xbc, weights.convolution, segments, bias=weights.bias)
        return state_space(mixed, *_gates(weights, limits, dt), weights.skip, segments, heads)
    bias = None if weights.bias is None else own_channels(weights.bias, heads)
    own = Mamba2Weights(
        convolution=own_channels(weights.convolution, heads),
        bias=bias,
        **{name: own_part(getattr(weights, name)) for name in ("A_log", "dt_bias", "skip")},
    )
    arrays = exchange_tokens(xbc, segments, heads), to_heads(dt, segments.split)
    out = _whole(own, own_heads(heads), limits, whole_segments(segments), *arrays)
    values = to_tokens(out.reshape(*out.shape[:2], -1), segments.split)
    return values.reshape(*values.shape[:2], heads.values, heads.value_dim)


def _last(weights: Mamba2Weights, heads: StateHeads, limits, segments: PackedSegments, xbc, dt) -> dict[str, Array]:
    mixed = causal_convolution(xbc, weights.convolution, segments, bias=weights.bias)
    arrays = *_gates(weights, limits, dt), weights.skip
    _, states = state_space_and_states(mixed, *arrays, segments, heads)
    return {"inputs": last_inputs(xbc, segments, weights.convolution.shape[2] - 1), "states": states}


def _step(weights: Mamba2Weights, heads: StateHeads, limits, states: dict[str, Array], xbc, dt):
    every = jnp.arange(len(xbc))
    return _advance(weights, heads, limits, states, every, every >= 0, xbc, dt)


def _advance(weights: Mamba2Weights, heads: StateHeads, limits, states: dict[str, Array], slots, begun, xbc, dt):
    before = states["inputs"], slots, begun
    mixed, inputs = convolve_rows(*before, xbc[:, None], weights.convolution, weights.bias)
    arrays = mixed[:, 0], *_gates(weights, limits, dt), weights.skip
    out, after = advance_states(states["states"], slots, begun, *arrays, heads)
    return out, {"inputs": inputs, "states": after}


def gated_group_norm(
    x: Float[Array, "*B I"],
    gate: Float[Array, "*B I"],
    weight: Float[Array, " I"],
    eps: float,
    *,
    groups: int = 1,
    backend: str = "auto",
) -> Float[Array, "*B I"]:
    """Return weight · the root-mean-square norm of each group of x · silu(gate), in x's dtype; the norm in float32.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    if gate.shape != x.shape or weight.shape != x.shape[-1:] or x.shape[-1] % groups:
        raise ValueError(
            f"gate must be {x.shape} and weight {x.shape[-1:]} as x, in {groups} groups, got {gate.shape} and "
            f"{weight.shape}"
        )
    kernels = GATED_NORM.load(GatedNormCall(dtype=x.dtype, width=x.shape[-1] // groups), backend=backend)
    if kernels is None:
        return reference_gated_norm(x, gate, weight, groups, eps)
    return fused_gated_norm(kernels, groups, eps, x, gate, weight)
