"""The norm of a residual stream, in the form that its reader multiplies."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxglue.ops.backend import Capability, Operation, form
from jaxglue.ops.gated_mlp import Activation, GatedParts, gated_mlp_reads_fp8
from jaxglue.ops.norm_rope import NormStyle, stream_norm
from jaxglue.ops.projection import Conditions, Projection, projections_read_fp8, ranks_of
from jaxglue.ops.projection.few_rows import few_rows_read_fp8
from jaxglue.ops.projection.fp8_adapters import FP8Rows, residual_norm_fp8

__all__ = ["RESIDUAL_NORM", "GatedInput", "Normed", "Reader", "residual_norm"]

Normed = Float[Array, "*B D"] | FP8Rows
"""A norm's output, as e4m3 values where FP8 products read it."""


class GatedInput(NamedTuple):
    """A gated feed-forward that reads a norm."""

    parts: GatedParts
    activation: Activation


Reader = Sequence[Projection] | GatedInput
"""All that reads a norm; empty where something else than projections does."""


def residual_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    eps: float,
    style: NormStyle,
    reader: Reader,
    context: Conditions,
) -> tuple[Float[Array, "*B D"], Normed]:
    """Return a residual stream x and its `rms_norm` for this reader, whose gradients are added in one pass."""
    gated = isinstance(reader, GatedInput)
    projections = reader.parts[:2] if isinstance(reader, GatedInput) else reader
    if projections and few_rows_read_fp8(x, projections, context, gated=gated):
        return residual_norm_fp8(x, weight, eps, style)
    if ranks_of(projections, context) is not None:
        return stream_norm(x, weight, eps, style)  # which the adapters read
    norm = RESIDUAL_NORM.load(reader, context)
    return (norm or stream_norm)(x, weight, eps, style)


def _check_fp8(capability: Capability | None, reader: Reader, context: Conditions) -> None:
    if not reader:
        raise NotImplementedError("not only projections read it")
    if not _reads_fp8(reader, context):
        raise NotImplementedError("a projection multiplies in another format, or its adapter reads more")


def _reads_fp8(reader: Reader, context: Conditions) -> bool:
    if isinstance(reader, GatedInput):
        return gated_mlp_reads_fp8(reader.parts, context, reader.activation)
    return projections_read_fp8(reader, context)


RESIDUAL_NORM = Operation(
    name="norm of the residual stream",
    backends={"fp8": form(_check_fp8, residual_norm_fp8, "e4m3 values and their scales are all that is written")},
)
"""Forms of `residual_norm`; a call is described by reader and context."""
