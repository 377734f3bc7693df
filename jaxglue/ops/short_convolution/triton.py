"""Launches of the gated convolution's kernels."""

import math
from dataclasses import dataclass

import jax

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.short_convolution import kernels

_CHANNELS = 1024
"""Channels of a tile: eight a thread, which 16 bytes hold."""
_COST = KernelCost(kind=KernelKind.ROWS)


@dataclass(frozen=True, kw_only=True)
class TritonShortConvolution(Launcher):
    """`ShortConvolutionBackend` by our own kernels."""

    tokens: int = 16
    """Tokens in a tile."""
    num_warps: int = 4

    def convolve(self, values, taps, bias, starts) -> jax.Array:
        """See `ShortConvolutionBackend`."""
        B, T, width = values.shape
        y = jax.ShapeDtypeStruct((B, T, width // 3), values.dtype)
        return self._run(kernels.convolution_kernel, values, taps, bias, starts, out=y)

    def convolve_gradient(self, values, taps, bias, starts, dy) -> jax.Array:
        """See `ShortConvolutionBackend`."""
        return self._run(
            kernels.convolution_gradient_kernel, values, taps, bias, starts, dy, out=shape_dtype_of(values)
        )

    def _run(self, kernel, values, taps, *others, out: jax.ShapeDtypeStruct) -> jax.Array:
        (B, T, _), (C, W) = values.shape, taps.shape
        channels = math.gcd(C, _CHANNELS)
        sizes = {"T": T, "C": C, "W": W, "BLOCK_T": self.tokens, "BLOCK_C": channels}
        grid, arrays = (C // channels, -(-T // self.tokens), B), (values, taps, *others)
        return self._launch(kernel, arrays, (out,), grid, sizes, self.num_warps, cost=_COST)[0]
