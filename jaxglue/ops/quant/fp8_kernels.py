"""Parts of Triton kernels that quantize rows to e4m3 values, as `quant.fp8`."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-120)


@triton.jit
def e4m3_scale(absmax):
    """Return the scale of a row of this largest magnitude; 1 for a row of zeros."""
    return tl.where(absmax > 0, tl.maximum(absmax * (1 / LARGEST), SMALLEST_SCALE), 1.0)


@triton.jit
def clip_e4m3(values):
    """Limit values to e4m3's range."""
    return tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
