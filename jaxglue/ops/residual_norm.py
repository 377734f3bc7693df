"""The norm of a residual stream, in the form that its reader multiplies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxglue.ops.backend import Capability, Operation, Reads, form
from jaxglue.ops.gated_mlp import Activation, GatedParts, gated_mlp_reads_fp8
from jaxglue.ops.norm_rope import NormStyle, stream_norm
from jaxglue.ops.projection import Conditions, Projection, StaticConditions, projections_read_fp8
from jaxglue.ops.projection.few_rows import FewRowsCall, few_rows_read_fp8
from jaxglue.ops.projection.fp8_adapters import FP8Rows, residual_norm_fp8

__all__ = ["RESIDUAL_NORM", "GatedInput", "Normed", "Reader", "ResidualNormCall", "residual_norm"]

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
    bias: Float[Array, " D"] | None = None,
) -> tuple[Float[Array, "*B D"], Normed]:
    """Return a residual stream x and its `reference_norm` for this reader, whose gradients are added in one pass.

    Args:
        x: the residual stream.
        weight, eps, style, bias: of the norm.
        reader: of its output.
        context: of the layer.
    """
    call = ResidualNormCall(x=x, style=style, reader=reader, conditions=StaticConditions.of(context))
    fp8_norm = RESIDUAL_NORM.load(call)
    if fp8_norm is None:
        return stream_norm(x, weight, eps, style, bias)
    return fp8_norm(x, weight, eps, style)


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualNormCall:
    """Meaning of a norm of the residual stream."""

    x: Float[Array, "*B D"]
    style: NormStyle
    reader: Reader
    conditions: StaticConditions
    """Of the reader's products."""

    @property
    def projections(self) -> Sequence[Projection]:
        """Return the projections that read the norm."""
        return self.reader.parts[:2] if isinstance(self.reader, GatedInput) else self.reader

    @property
    def few_rows(self) -> FewRowsCall:
        """Return the meaning of the reader's products without gradients."""
        gated = isinstance(self.reader, GatedInput)
        activation = self.reader.activation if isinstance(self.reader, GatedInput) else "silu"
        return FewRowsCall.of(self.x, self.projections, self.conditions, gated=gated, activation=activation)


def _check_rms(style: NormStyle) -> None:
    if style.centered or style.bias:
        raise NotImplementedError("adapters read the input of a root-mean-square norm alone")


def _check_few_rows(capability: Capability | None, call: ResidualNormCall) -> None:
    _check_rms(call.style)
    if not call.projections or not few_rows_read_fp8(call.few_rows):
        raise NotImplementedError("no kernels of few rows read e4m3 values")


def _check_fp8(capability: Capability | None, call: ResidualNormCall) -> None:
    _check_rms(call.style)
    if not call.reader:
        raise NotImplementedError("not only projections read it")
    if call.conditions.ranks and any(projection.adapter is not None for projection in call.projections):
        raise NotImplementedError("adapters of several requests read the norm")
    if not _reads_fp8(call.reader, call.conditions):
        raise NotImplementedError("a projection multiplies in another format, or its adapter reads more")


def _reads_fp8(reader: Reader, conditions: StaticConditions) -> bool:
    if isinstance(reader, GatedInput):
        return gated_mlp_reads_fp8(reader.parts, conditions, reader.activation)
    return projections_read_fp8(reader, conditions)


_READS: Reads = {
    ResidualNormCall: ("x", "style", "reader", "conditions"),
    NormStyle: ("offset", "rounds_first"),
    GatedInput: ("parts", "activation"),
    **dict.fromkeys((GatedParts, Projection, StaticConditions)),
}
"""What a form of the norm reads; its readers' operations check the others."""

RESIDUAL_NORM = Operation(
    name="norm of the residual stream",
    backends={
        "few_rows": form(
            _check_few_rows, residual_norm_fp8, "kernels of few rows read e4m3 values and their scales", _READS
        ),
        "fp8": form(_check_fp8, residual_norm_fp8, "e4m3 values and their scales are all that is written", _READS),
    },
)
"""Forms of `residual_norm`."""
