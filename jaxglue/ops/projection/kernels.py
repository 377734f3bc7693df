"""Triton kernels of adapters' products, their gradients, and FP8 quantization: a wide array is read once in each.

A matrix of a few ranks cannot fill tensor cores, so all of these are bound by the memory's rate. An argument that a
call has no use for is None, and its part of the kernel is not compiled.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jaxglue.ops.quant.fp8_kernels import clip_e4m3, e4m3_scale


@triton.jit
def gradients_kernel(
    dy, matrix, low_rank, column_factors, row_scales, dlow_rank, dmatrix, fp8_values,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute partial sums over rows and COLUMNS of dy [M, N]; grid (M / BLOCK_M, N / COLUMNS).

    Sum dlow_rank [N / COLUMNS, M, R] over columns and dmatrix [M / BLOCK_M, N, R] over rows afterwards. low_rank
    [M, STRIDE] has this product's ranks from FIRST on. With fp8_values [M, N], write dy · column_factors [N] /
    row_scales [M] in e4m3 there.
    """
    rows, ranks = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    inside = (rows < M)[:, None] & (ranks < R)[None, :]
    # Rows stay in registers for all columns: the sum over rows is then one product a tile, and only partial sums of few
    # programs are written. These are added in a fixed order afterwards; atomics would not repeat to the bit.
    of_adapter = tl.load(low_rank + rows[:, None] * STRIDE + FIRST + ranks[None, :], mask=inside, other=0.0)
    product = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    if fp8_values is not None:
        inverse = 1.0 / tl.load(row_scales + rows, mask=rows < M, other=1.0)  # one division a row, not one a value
    first = tl.program_id(1) * COLUMNS
    for start in range(first, min(first + COLUMNS, N), BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        wide = rows[:, None].to(tl.int64) * N + columns[None, :]
        tile = tl.load(dy + wide, mask=mask, other=0.0)
        if fp8_values is not None:
            factors = tl.load(column_factors + columns, mask=columns < N, other=0.0)
            # The scales' quotient may be rounded up, and e4m3 has only NaN beyond its largest value.
            values = clip_e4m3(tile.to(tl.float32) * factors[None, :] * inverse[:, None])
            tl.store(fp8_values + wide, values.to(fp8_values.dtype.element_ty), mask=mask)
        at, mask = columns[:, None] * R + ranks[None, :], (columns < N)[:, None] & (ranks < R)[None, :]
        factor = tl.load(matrix + at, mask=mask, other=0.0).to(tile.dtype)
        product = tl.dot(tile, factor, product, input_precision=PRECISION)
        to = dmatrix + tl.program_id(0).to(tl.int64) * N * R + at
        tl.store(to, tl.dot(tl.trans(tile), of_adapter, input_precision=PRECISION), mask=mask)
    to = dlow_rank + (tl.program_id(1).to(tl.int64) * M + rows[:, None]) * R + ranks[None, :]
    tl.store(to, product, mask=inside)


@triton.jit
def product_kernel(
    low_rank, matrix, base, row_scales, column_factors, addend, out,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out [M, N] = low_rank·matrixᵀ (+ base (· row_scales [M]) (· column_factors [N])) (+ addend).

    low_rank [M, STRIDE] has this product's ranks from FIRST on. Grid (N / BLOCK_N, M / BLOCK_M): programs that run
    together write neighboring columns of the same rows.
    """
    rows, ranks = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, mask = rows[:, None].to(tl.int64) * N + columns[None, :], (rows < M)[:, None] & (columns < N)[None, :]
    inside = (rows < M)[:, None] & (ranks < R)[None, :]
    of_adapter = tl.load(low_rank + rows[:, None] * STRIDE + FIRST + ranks[None, :], mask=inside, other=0.0)
    inside = (columns < N)[:, None] & (ranks < R)[None, :]
    factor = tl.load(matrix + columns[:, None] * R + ranks[None, :], mask=inside, other=0.0).to(of_adapter.dtype)
    product = tl.dot(of_adapter, tl.trans(factor), input_precision=PRECISION)
    # All terms are added in float32 and rounded once: an adapter's product alone is often below a stream's last bit.
    if base is not None:
        scaled = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
        if row_scales is not None:
            scaled *= tl.load(row_scales + rows, mask=rows < M, other=0.0)[:, None]
        if column_factors is not None:
            scaled *= tl.load(column_factors + columns, mask=columns < N, other=0.0)[None, :]
        product += scaled
    if addend is not None:
        product += tl.load(addend + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, kw_only=True)
class SumsSpec:
    """Constants of `sums_kernel`."""

    M: int
    R: int
    stride: int
    widths: tuple[int, ...]
    """Columns of each product."""
    firsts: tuple[int, ...]
    """First program of each."""
    factors: tuple[float, ...]
    block_m: int
    block_n: int
    block_r: int
    precision: str


@triton.jit
def sums_kernel(low_rank, matrices, products, stream, outs, spec: tl.constexpr):
    """Compute products_i [M, N_i] + low_rank_i·(factor_i · matrix_i)ᵀ of several adapters (+ stream).

    low_rank [M, STRIDE] has all adapters' ranks, R each, matrices [N_i, R] are in float32. An adapter's product is
    rounded by itself where no stream is added, as are those of `product_kernel`, whose bits these have. Grid
    (Σ N_i / BLOCK_N, M / BLOCK_M).
    """
    COUNT: tl.constexpr = len(spec.widths)
    for i in tl.static_range(COUNT):
        tile = tl.program_id(0) - spec.firsts[i]
        if (tile >= 0) & (tile * spec.block_n < spec.widths[i]):
            N: tl.constexpr = spec.widths[i]
            rows, ranks = tl.program_id(1) * spec.block_m + tl.arange(0, spec.block_m), tl.arange(0, spec.block_r)
            columns = tile * spec.block_n + tl.arange(0, spec.block_n)
            at, mask = (
                rows[:, None].to(tl.int64) * N + columns[None, :],
                (rows < spec.M)[:, None] & (columns < N)[None, :],
            )
            inside = (rows < spec.M)[:, None] & (ranks < spec.R)[None, :]
            first = rows[:, None] * spec.stride + i * spec.R
            of_adapter = tl.load(low_rank + first + ranks[None, :], mask=inside, other=0.0)
            inside = (columns < N)[:, None] & (ranks < spec.R)[None, :]
            matrix = tl.load(matrices[i] + columns[:, None] * spec.R + ranks[None, :], mask=inside, other=0.0)
            factor = (matrix * spec.factors[i]).to(of_adapter.dtype)
            total = tl.dot(of_adapter, tl.trans(factor), input_precision=spec.precision)
            if stream is None:
                total = total.to(of_adapter.dtype).to(tl.float32)
            total += tl.load(products[i] + at, mask=mask, other=0.0).to(tl.float32)
            if stream is not None:
                total += tl.load(stream + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(outs[i] + at, total.to(of_adapter.dtype), mask=mask)


@triton.jit
def encode_kernel(
    x, columns, row_scales, fp8_values, scales,
    M: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize rows of x [M, D], times `columns` [D] if any, by scales `given` [M] or by their largest values.

    The hardware converts to e4m3 here; XLA's conversion takes several instructions a value. Grid (M / ROWS).
    """
    at = tl.arange(0, BLOCK)
    mask, first = at < D, tl.program_id(0).to(tl.int64) * ROWS
    if columns is not None:
        factors = tl.load(columns + at, mask=mask, other=0.0)  # once for all rows of the program
    for row in range(first, tl.minimum(first + ROWS, M)):
        values = tl.load(x + row * D + at, mask=mask, other=0.0).to(tl.float32)
        if columns is not None:
            values = values * factors
        scale = e4m3_scale(tl.max(tl.abs(values), 0)) if row_scales is None else tl.load(row_scales + row)
        values = clip_e4m3(values / scale)
        tl.store(fp8_values + row * D + at, values.to(fp8_values.dtype.element_ty), mask=mask)
        tl.store(scales + row, scale)
