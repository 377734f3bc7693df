"""Triton kernel of quantization by row: each value read once, by the hardware's conversion, which XLA does not use."""

import triton
import triton.language as tl

from jaxglue.ops.quant.fp8_kernels import clip_e4m3, e4m3_scale


@triton.jit
def encode_kernel(
    x, columns, given, codes, scales,
    M: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Quantize rows of x [M, D], times `columns` [D], by scales `given` [M] or by their largest values.

    A program reads the columns once for ROWS rows; grid (M / ROWS).
    """
    at = tl.arange(0, BLOCK)
    mask, first = at < D, tl.program_id(0).to(tl.int64) * ROWS
    if HAS_COLUMNS:
        factors = tl.load(columns + at, mask=mask, other=0.0)
    for row in range(first, tl.minimum(first + ROWS, M)):
        values = tl.load(x + row * D + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_COLUMNS:
            values = values * factors
        scale = tl.load(given + row) if HAS_SCALES else e4m3_scale(tl.max(tl.abs(values), 0))
        values = clip_e4m3(values / scale)
        tl.store(codes + row * D + at, values.to(codes.dtype.element_ty), mask=mask)
        tl.store(scales + row, scale)
