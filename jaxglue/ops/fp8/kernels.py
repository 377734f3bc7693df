"""Triton kernel of quantization by row: each value read once, by the hardware's conversion, which XLA does not use."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-120)


@triton.jit
def encode_kernel(
    x, columns, given, codes, scales,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Quantize one row of x [M, D], times `columns` [D], by its scale of `given` [M] or its largest value; grid (M)."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = at < D
    values = tl.load(x + row * D + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_COLUMNS:
        values = values * tl.load(columns + at, mask=mask, other=0.0)
    if HAS_SCALES:
        scale = tl.load(given + row)
    else:
        absmax = tl.max(tl.abs(values), 0)
        scale = tl.where(absmax > 0, tl.maximum(absmax * (1 / LARGEST), SMALLEST_SCALE), 1.0)
    values = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
    tl.store(codes + row * D + at, values.to(codes.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale)
