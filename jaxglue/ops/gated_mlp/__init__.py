"""Gated feed-forwards, down(activation(gate(x)) · up(x)), and the forms in which adapters cost few passes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.backend import Capability, Operation, Reads, form
from jaxglue.ops.collectives import axis_size
from jaxglue.ops.gated_mlp.fp8 import gate_fp8, swiglu_fp8
from jaxglue.ops.gated_mlp.swiglu import ACTIVATIONS, Activation, lora_swiglu, part_in_order
from jaxglue.ops.projection import (
    Conditions,
    LowRankAdapter,
    Projection,
    StaticConditions,
    adapted_projection,
    add_to_stream,
    base_products,
    check_frozen_fp8,
    multiply,
    project_in_order,
    ranks_of,
    shared_down,
    used_ranks,
)
from jaxglue.ops.projection.call import EXPANDED_WEIGHTS, check_unserved
from jaxglue.ops.projection.few_rows import FewRowsCall, gate_few_rows, load_few_rows
from jaxglue.ops.projection.fp8_adapters import FP8Rows
from jaxglue.ops.projection.ordered import ordered_products
from jaxglue.ops.quant.fp8 import FP8Weight

__all__ = ["ACTIVATIONS", "GATED_MLP", "Activation", "GatedCall", "GatedParts", "gated_mlp", "gated_mlp_reads_fp8"]


class GatedParts(NamedTuple):
    """Projections of a gated feed-forward."""

    gate: Projection
    up: Projection
    down: Projection


def gated_mlp(
    x: Float[Array, "*B D"] | FP8Rows,
    parts: GatedParts,
    conditions: Conditions,
    *,
    stream: Float[Array, "*B D"],
    activation: Activation = "silu",
) -> Float[Array, "*B D"]:
    """Return stream + down(activation(gate(x)) · up(x)).

    Args:
        x: the input; e4m3 values of a norm where `gated_mlp_reads_fp8`.
        parts: the projections.
        conditions: of the layer.
        stream: the residual stream.
        activation: of the gate.
    """
    few_rows = FewRowsCall.of(x, parts[:2], conditions, gated=True, activation=activation)
    if (kernels := load_few_rows(few_rows)) is not None:
        y = gate_few_rows(kernels, x, parts[:2], conditions, activation)
        return adapted_projection(y, parts[2:], conditions, stream=stream)[0]
    if ranks_of(parts, conditions) is not None and StaticConditions.of(conditions).by_ranks:
        return _apply_separately(x, parts, conditions, stream, activation)
    apply = GATED_MLP.load(GatedCall.of(parts, conditions, activation)) or _apply_separately
    return apply(x, parts, conditions, stream, activation)


def gated_mlp_reads_fp8(parts: GatedParts, conditions: Conditions | StaticConditions, activation: Activation) -> bool:
    """Return whether e4m3 values of the input are read alone, so a norm need write nothing else."""
    return GATED_MLP.load(GatedCall.of(parts, conditions, activation)) in (_apply_in_fp8, _apply_without_gradients)


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedCall:
    """Meaning of a gated feed-forward."""

    parts: GatedParts
    conditions: StaticConditions
    activation: Activation = "silu"

    @classmethod
    def of(cls, parts: GatedParts, conditions: Conditions | StaticConditions, activation: Activation) -> "GatedCall":
        """Return the meaning of a feed-forward under a layer's conditions."""
        return cls(parts=parts, conditions=StaticConditions.of(conditions), activation=activation)


def _check_swiglu(capability: Capability | None, call: GatedCall) -> None:
    """Raise NotImplementedError where the activation's kernels cannot form the products of adapters."""
    parts = call.parts
    check_unserved(parts)
    if any(part.adapter is None for part in parts):
        raise NotImplementedError("a projection has no adapter")
    if parts.gate.bias is not None or parts.up.bias is not None:
        raise NotImplementedError("biases are added before the activation")
    gate, up, down = (part.adapter for part in parts)
    assert gate is not None and up is not None and down is not None
    if gate.magnitude is not None or up.magnitude is not None:
        raise NotImplementedError("magnitudes (DoRA) scale the sum of product and adapter")
    if down.dropout > 0.0 and call.conditions.dropout:
        raise NotImplementedError("dropout gives down's adapter an input of its own")
    ranks = gate.B.shape[1], up.B.shape[1], down.A.shape[0]
    if len(set(ranks)) > 1:
        raise NotImplementedError(f"adapters must have one rank, got {', '.join(map(str, ranks))}")


def _check_fp8(capability: Capability | None, call: GatedCall) -> None:
    check_frozen_fp8(call.parts, call.conditions)
    _check_swiglu(capability, call)
    if call.parts.down.bias is not None:
        raise NotImplementedError("a bias is added beside the product")


def _check_without_gradients(capability: Capability | None, call: GatedCall) -> None:
    if not call.conditions.inference:
        raise NotImplementedError("gradients may be taken")
    check_frozen_fp8(call.parts, call.conditions, adapted=False)
    if any(part.bias is not None for part in call.parts):
        raise NotImplementedError("biases are added before the activation, and beside the last product")
    if axis_size("tensor") > 1:
        raise NotImplementedError("devices along the axis tensor sum their parts")


def _matrices(parts: GatedParts) -> tuple[Array, Array, Array]:
    """Return the matrices that kernels read: the second ones of gate and up, and the first one of down."""
    gate, up, down = (part.adapter for part in parts)
    assert gate is not None and up is not None and down is not None
    return gate.up, up.up, down.A


def _apply_in_fp8(x, parts: GatedParts, conditions: Conditions, stream, activation: Activation) -> Array:
    assert parts.down.adapter is not None
    weights: Any = tuple(part.weight for part in parts)
    return swiglu_fp8(stream, x, weights, shared_down(parts[:2]), _matrices(parts), parts.down.adapter.up, activation)


def _apply_without_gradients(x, parts: GatedParts, conditions: Conditions, stream, activation: Activation) -> Array:
    return gate_fp8(stream, x, parts.gate.weight, parts.up.weight, parts.down.weight, activation)


def _apply_lora_swiglu(x, parts: GatedParts, conditions: Conditions, stream, activation: Activation) -> Array:
    """Let the activation's kernels form the adapters' products where they read the projections."""
    assert not isinstance(x, FP8Rows)
    static = StaticConditions.of(conditions)
    if static.in_one_order and (fed := _apply_in_order(x, parts, conditions, stream, activation)) is not None:
        return fed
    (gate, up), low_rank = base_products(x, parts[:2], conditions)
    assert low_rank is not None
    gate, up = checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP)
    y, low_rank = lora_swiglu(gate, up, low_rank, _matrices(parts), activation=activation, exact=static.exact)
    (product,) = multiply(y, parts[2:], conditions)
    low_rank = checkpoint_name(used_ranks(low_rank, conditions), names.LOW_RANK)
    return add_to_stream(stream, parts.down, product, low_rank, conditions)


def _apply_in_order(x, parts: GatedParts, conditions: Conditions, stream, activation: Activation) -> Array | None:
    """Do as `_apply_lora_swiglu`, to the bit, of few rows and without gradients; None where no kernel does."""
    down = _matrices(parts)[2]
    if (part := part_in_order(x.dtype, len(down), activation)) is None:
        return None
    if (fed := project_in_order(x, parts[:2], conditions, activation=activation)) is None:
        return None
    if (added := project_in_order(fed[0], parts[2:], conditions, stream, part=part)) is not None:
        return added[0]
    product, low_rank = ordered_products(fed[0], [parts.down.weight, down], part=part)
    return add_to_stream(stream, parts.down, product, used_ranks(low_rank, conditions), conditions)


def _apply_separately(x, parts: GatedParts, conditions: Conditions, stream, activation: Activation) -> Array:
    gate, up = adapted_projection(x, parts[:2], conditions)
    gate, up = checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP)
    return adapted_projection(ACTIVATIONS[activation](gate) * up, parts[2:], conditions, stream=stream)[0]


_READ: Reads = {
    GatedCall: {"parts": None, "conditions": None, "activation": ("silu", "gelu_tanh")},
    GatedParts: GatedParts._fields,
    StaticConditions: ("dropout", "fp8", "inference"),
}
_ADAPTER: Reads = {LowRankAdapter: ("A", "B", "scale", "dropout", "salt", "magnitude")}
_FP8_WEIGHT: Reads = {FP8Weight: ("values", "scales", "dtype")}

GATED_MLP = Operation(
    name="gated feed-forward",
    backends={
        "fp8": form(
            _check_fp8,
            _apply_in_fp8,
            "scales are applied, and outputs quantized, where kernels read and write",
            reads={**_READ, Projection: ("weight", "adapter"), **_ADAPTER, **_FP8_WEIGHT},
        ),
        "fp8_inference": form(
            _check_without_gradients,
            _apply_without_gradients,
            "without adapters or gradients, the activation applies scales and quantizes its output",
            reads={**_READ, Projection: ("weight",), **_FP8_WEIGHT},
        ),
        "lora_swiglu": form(
            _check_swiglu,
            _apply_lora_swiglu,
            "the activation forms the products of adapters where it reads the projections",
            reads={
                **_READ,
                StaticConditions: ("dropout", "fp8", "inference", "ranks", "exact"),
                Projection: ("weight", "bias", "adapter", "trains_in_fp8"),
                **_ADAPTER,
                **EXPANDED_WEIGHTS,
            },
        ),
    },
)
"""Forms of `gated_mlp`."""
