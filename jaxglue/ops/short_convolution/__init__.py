"""Gated causal convolutions of a few tokens of each channel within its document (LFM2, arXiv 2511.23404, 2.2)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_tried, check_triton
from jaxglue.ops.delta_rule import last_inputs
from jaxglue.ops.recurrence import Recurrence
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.short_convolution.reference import convolution_inputs, convolution_step, reference_convolution
from jaxglue.ops.short_convolution.vjp import fused_convolution

if TYPE_CHECKING:
    from jaxglue.ops.short_convolution.triton import TritonShortConvolution

__all__ = ["SHORT_CONVOLUTION", "ShortConvolutionCall", "short_convolution"]

_MOST_TAPS = 8


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionCall:
    """Meaning of a gated convolution over the tokens of documents."""

    dtype: jnp.dtype
    taps: int
    bias: bool = False


def _check(capability: Capability | None, call: ShortConvolutionCall) -> None:
    check_triton(capability, call.dtype)
    check_tried("short convolution")
    if call.taps > _MOST_TAPS:
        raise NotImplementedError(f"convolutions must have at most {_MOST_TAPS} taps, got {call.taps}")


def _load(capability: Capability, call: ShortConvolutionCall) -> "TritonShortConvolution":
    from jaxglue.ops.short_convolution.triton import TritonShortConvolution

    return TritonShortConvolution.of(capability)


SHORT_CONVOLUTION = Operation(
    name="short convolution",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="values are read and written once",
            reads={ShortConvolutionCall: ("dtype", "taps", "bias")},
        )
    },
)


def short_convolution(
    weight: Float[Array, "C 1 W"], bias: Float[Array, " C"] | None = None, *, backend: str = "auto"
) -> Recurrence:
    """Return the recurrence gate · convolution(before · x) of values [B, T, 3·C]: before, gate and x, side by side.

    A convolution sums the last W tokens of a document, each channel by its weights, plus its bias, in float32; tokens
    before a document's first are zeros. Both products are in the values' dtype. The backward pass computes the sums
    again. The state is the last W - 1 of before · x [W - 1, C], the oldest first.

    Args:
        weight: the last of a channel's is the token's own, as torch's `Conv1d` with groups of one channel stores them.
        bias: of each channel; None for none.
        backend: `auto`, `reference` or `triton`; see `SHORT_CONVOLUTION.choose`.

    Raises:
        ValueError: weights of another shape, or values that do not fit; a named backend that cannot serve.
    """
    if weight.ndim != 3 or weight.shape[1] != 1:
        raise ValueError(f"weight must be [C, 1, W], got shape {weight.shape}")

    def whole(segments: PackedSegments, values: Float[Array, "B T 3C"]) -> Float[Array, "B T C"]:
        _check_values(values, weight)
        call = ShortConvolutionCall(dtype=values.dtype, taps=weight.shape[2], bias=bias is not None)
        kernels = SHORT_CONVOLUTION.load(call, backend=backend)
        if kernels is None:
            return reference_convolution(values, weight, bias, segments)
        return fused_convolution(kernels, values, weight, bias, segments)

    def last(segments: PackedSegments, values: Float[Array, "B T 3C"]) -> Float[Array, "B S W-1 C"]:
        return last_inputs(convolution_inputs(values)[0], segments, weight.shape[2] - 1)

    return Recurrence(whole, last, partial(convolution_step, weight, bias))


def _check_values(values: Array, weight: Array) -> None:
    if values.ndim != 3 or values.shape[-1] != 3 * weight.shape[0]:
        expected = f"[B, T, {3 * weight.shape[0]}] for {weight.shape[0]} channels"
        raise ValueError(f"values must be {expected}, got shape {values.shape}")
