"""Triton kernels of LoRA products and their gradients; the latter read the wide cotangent once."""

import triton
import triton.language as tl

from jaxglue.ops.quant.fp8_kernels import clip_e4m3


@triton.jit
def gradients_kernel(
    dy, matrix, hidden, column_factors, row_scales, dhidden, dmatrix, codes,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Compute partial sums over rows and COLUMNS of dy [M, N]; grid (M / BLOCK_M, N / COLUMNS).

    Sum dhidden [N / COLUMNS, M, R] over columns and dmatrix [M / BLOCK_M, N, R] over rows afterwards. hidden
    [M, STRIDE] has this product's ranks from FIRST on. With QUANTIZE, codes [M, N] are dy · column_factors [N] /
    row_scales [M] in e4m3.
    """
    rows, ranks = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    inside = (rows < M)[:, None] & (ranks < R)[None, :]
    own = tl.load(hidden + rows[:, None] * STRIDE + FIRST + ranks[None, :], mask=inside, other=0.0)
    product = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    if QUANTIZE:
        inverse = 1.0 / tl.load(row_scales + rows, mask=rows < M, other=1.0)
    first = tl.program_id(1) * COLUMNS
    for start in range(first, min(first + COLUMNS, N), BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        wide = rows[:, None].to(tl.int64) * N + columns[None, :]
        tile = tl.load(dy + wide, mask=mask, other=0.0)
        if QUANTIZE:
            factors = tl.load(column_factors + columns, mask=columns < N, other=0.0)
            values = clip_e4m3(tile.to(tl.float32) * factors[None, :] * inverse[:, None])
            tl.store(codes + wide, values.to(codes.dtype.element_ty), mask=mask)
        at, mask = columns[:, None] * R + ranks[None, :], (columns < N)[:, None] & (ranks < R)[None, :]
        factor = tl.load(matrix + at, mask=mask, other=0.0).to(tile.dtype)
        product = tl.dot(tile, factor, product, input_precision=PRECISION)
        to = dmatrix + tl.program_id(0).to(tl.int64) * N * R + at
        tl.store(to, tl.dot(tl.trans(tile), own, input_precision=PRECISION), mask=mask)
    tl.store(dhidden + (tl.program_id(1).to(tl.int64) * M + rows[:, None]) * R + ranks[None, :], product, mask=inside)


@triton.jit
def product_kernel(
    hidden, matrix, base, row_scales, column_factors, addend, out,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BASE: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out [M, N] = hidden·matrixᵀ (+ base (· row_scales [M]) (· column_factors [N])) (+ addend).

    hidden [M, STRIDE] has this product's ranks from FIRST on. Grid (N / BLOCK_N, M / BLOCK_M).
    """
    rows, ranks = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, mask = rows[:, None].to(tl.int64) * N + columns[None, :], (rows < M)[:, None] & (columns < N)[None, :]
    inside = (rows < M)[:, None] & (ranks < R)[None, :]
    own = tl.load(hidden + rows[:, None] * STRIDE + FIRST + ranks[None, :], mask=inside, other=0.0)
    inside = (columns < N)[:, None] & (ranks < R)[None, :]
    factor = tl.load(matrix + columns[:, None] * R + ranks[None, :], mask=inside, other=0.0).to(own.dtype)
    product = tl.dot(own, tl.trans(factor), input_precision=PRECISION)
    if HAS_BASE:
        scaled = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_ROWS:
            scaled *= tl.load(row_scales + rows, mask=rows < M, other=0.0)[:, None]
        if HAS_COLUMNS:
            scaled *= tl.load(column_factors + columns, mask=columns < N, other=0.0)[None, :]
        product += scaled
    if HAS_ADDEND:
        product += tl.load(addend + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)
