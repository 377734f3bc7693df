"""Gated feed-forwards, down(activation(gate(x)) · up(x)), and the forms in which adapters cost few passes."""

from typing import Any, NamedTuple

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.backend import Capability, Operation, form
from jaxglue.ops.collectives import axis_size
from jaxglue.ops.gated_mlp.fp8 import gate_fp8, swiglu_fp8
from jaxglue.ops.gated_mlp.swiglu import ACTIVATIONS, Activation, lora_swiglu
from jaxglue.ops.projection import (
    Conditions,
    Projection,
    adapted_projection,
    add_to_stream,
    base_products,
    check_frozen_fp8,
    multiply,
    ranks_of,
    shared_down,
)
from jaxglue.ops.projection.few_rows import gate_few_rows, load_few_rows
from jaxglue.ops.projection.fp8_adapters import FP8Rows

__all__ = ["ACTIVATIONS", "GATED_MLP", "Activation", "GatedParts", "gated_mlp", "gated_mlp_reads_fp8"]


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
    if (kernels := load_few_rows(x, parts[:2], conditions, gated=True)) is not None:
        y = gate_few_rows(kernels, x, parts[:2], conditions, activation)
        return adapted_projection(y, parts[2:], conditions, stream=stream)[0]
    if ranks_of(parts, conditions) is not None:
        return _apply_separately(x, parts, conditions, stream, activation)
    apply = GATED_MLP.load(parts, conditions, activation) or _apply_separately
    return apply(x, parts, conditions, stream, activation)


def gated_mlp_reads_fp8(parts: GatedParts, conditions: Conditions, activation: Activation) -> bool:
    """Return whether e4m3 values of the input are read alone, so a norm need write nothing else."""
    return GATED_MLP.load(parts, conditions, activation) in (_apply_in_fp8, _apply_without_gradients)


def _check_swiglu(
    capability: Capability | None, parts: GatedParts, conditions: Conditions, activation: Activation
) -> None:
    """Raise NotImplementedError where the activation's kernels cannot form the products of adapters."""
    if any(part.adapter is None for part in parts):
        raise NotImplementedError("a projection has no adapter")
    if parts.gate.bias is not None or parts.up.bias is not None:
        raise NotImplementedError("biases are added before the activation")
    gate, up, down = (part.adapter for part in parts)
    assert gate is not None and up is not None and down is not None
    if gate.magnitude is not None or up.magnitude is not None:
        raise NotImplementedError("magnitudes (DoRA) scale the sum of product and adapter")
    if down.dropout > 0.0 and conditions.dropout_key is not None:
        raise NotImplementedError("dropout gives down's adapter an input of its own")
    ranks = gate.B.shape[1], up.B.shape[1], down.A.shape[0]
    if len(set(ranks)) > 1:
        raise NotImplementedError(f"adapters must have one rank, got {', '.join(map(str, ranks))}")


def _check_fp8(
    capability: Capability | None, parts: GatedParts, conditions: Conditions, activation: Activation
) -> None:
    check_frozen_fp8(parts, conditions)
    _check_swiglu(capability, parts, conditions, activation)
    if parts.down.bias is not None:
        raise NotImplementedError("a bias is added beside the product")


def _check_without_gradients(
    capability: Capability | None, parts: GatedParts, conditions: Conditions, activation: Activation
) -> None:
    if not getattr(conditions, "inference", False):
        raise NotImplementedError("gradients may be taken")
    check_frozen_fp8(parts, conditions, adapted=False)
    if any(part.bias is not None for part in parts):
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
    matrices = _matrices(parts)
    (gate, up), low_rank = base_products(x, parts[:2], conditions)
    assert low_rank is not None
    gate, up = checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP)
    y, low_rank = lora_swiglu(gate, up, low_rank, matrices, activation=activation)
    (product,) = multiply(y, parts[2:], conditions)
    return add_to_stream(stream, parts.down, product, checkpoint_name(low_rank, names.LOW_RANK))


def _apply_separately(x, parts: GatedParts, conditions: Conditions, stream, activation: Activation) -> Array:
    gate, up = adapted_projection(x, parts[:2], conditions)
    gate, up = checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP)
    return adapted_projection(ACTIVATIONS[activation](gate) * up, parts[2:], conditions, stream=stream)[0]


GATED_MLP = Operation(
    name="gated feed-forward",
    backends={
        "fp8": form(
            _check_fp8, _apply_in_fp8, "scales are applied, and outputs quantized, where kernels read and write"
        ),
        "fp8_inference": form(
            _check_without_gradients,
            _apply_without_gradients,
            "without adapters or gradients, the activation applies scales and quantizes its output",
        ),
        "lora_swiglu": form(
            _check_swiglu,
            _apply_lora_swiglu,
            "the activation forms the products of adapters where it reads the projections",
        ),
    },
)
"""Forms of `gated_mlp`; a call is described by parts, conditions and activation."""
