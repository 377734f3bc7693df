"""Differentiation rule of the gated convolution by kernels."""

from functools import partial
from typing import Protocol

import jax
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.short_convolution.reference import convolve


class ShortConvolutionBackend(Protocol):
    """Kernels that read and write every value once."""

    def convolve(self, values, taps: Float[Array, "C W"], bias, starts) -> Float[Array, "B T C"]:
        """Return `short_convolution` within documents that begin at `starts` [B, T]; bias [C] or None."""

    def convolve_gradient(self, values, taps: Float[Array, "C W"], bias, starts, dy) -> Float[Array, "B T 3C"]:
        """Return the gradient to the values."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_convolution(
    kernels: ShortConvolutionBackend,
    values: Float[Array, "B T 3C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
    segments: PackedSegments,
) -> Float[Array, "B T C"]:
    """Compute `short_convolution` of packed rows by kernels; weight and bias get gradients only where they train."""
    return kernels.convolve(values, weight[:, 0], bias, segments.starts)


def _forward(kernels, values, weight, bias, segments):
    trained = weight.perturbed or (bias is not None and bias.perturbed)
    given = jax.tree.map(lambda primal: primal.value, (values, weight, bias, segments))
    return fused_convolution(kernels, *given), (*given, () if trained else None)


def _backward(kernels, residuals, dy) -> tuple[Array | None, ...]:
    values, weight, bias, segments, trained = residuals
    dvalues = kernels.convolve_gradient(values, weight[:, 0], bias, segments.starts, dy)
    if trained is None:
        return dvalues, None, None, None
    # By XLA: only full fine-tuning trains convolutions.
    _, pull = jax.vjp(lambda weight, bias: convolve(values, weight, bias, segments), weight, bias)
    return dvalues, *pull(dy), None


fused_convolution.defvjp(_forward, _backward, symbolic_zeros=True)
