"""Triton kernels between the matmuls of a small layer; adapters' ranks are further columns of the operands.

Extended values [M, WIDTH] are a matmul's input [M, D], its projections to the ranks of all adapters, R each, and zeros.
An adapter's first matrix A is [R, D], its second one B [out, R], both float32.
"""

import triton
import triton.language as tl

from jaxglue.ops.norm_rope.kernels import normed, rms_scale


@triton.jit
def _select(pointers, which, dtype: tl.constexpr):
    """Return the pointer of this number, or of these numbers, among a launch's arguments."""
    # Arguments cannot be indexed by a loaded number, and pointers in a tensor lose the alignment that wide loads need.
    address = tl.where(which == 0, pointers[0].to(tl.int64), 0)
    for i in tl.static_range(1, len(pointers)):
        address = tl.where(which == i, pointers[i].to(tl.int64), address)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _tile(
    row, column, M: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return (base, offsets, mask) of a tile of an array [M, STRIDE] whose first D columns are wanted."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offsets = rows[:, None] * STRIDE + columns[None, :]  # 32-bit, and the same in every turn of a loop
    mask = (row + rows < M)[:, None] & (column + columns < D)[None, :]
    return tl.cast(row, tl.int64) * STRIDE + column, offsets, mask


@triton.jit
def _load(x, row, column, M: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr):  # fmt: skip
    base, offsets, mask = _tile(row, column, M, D, STRIDE, ROWS, COLUMNS)
    return tl.load(x + base + offsets, mask=mask, other=0.0)


@triton.jit
def _store(x, value, row, column, M: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    base, offsets, mask = _tile(row, column, M, D, STRIDE, ROWS, COLUMNS)
    tl.store(x + base + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _weight(weight, columns, D: tl.constexpr):
    return tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_ranks(out, ranks, row, M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_M: tl.constexpr):  # fmt: skip
    """Store ranks, then zeros, in the last columns of extended values."""
    REST: tl.constexpr = WIDTH - D
    for start in tl.static_range(0, WIDTH - D, BLOCK_R):
        value = ranks if start == 0 else tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
        _store(out + D, value, row, start, M, REST, WIDTH, BLOCK_M, BLOCK_R)


@triton.jit
def _norm_tile(tile, scale, weight, start, D: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr):
    """Return the norm of columns from `start` on, rounded where the reference rounds."""
    return normed(tile.to(tl.float32), scale, _weight(weight, start + tl.arange(0, BLOCK_N), D), dtype).to(dtype)


@triton.jit
def extend_kernel(
    x, weight, downs, out,
    M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Extend the norm of x [M, D] to out [M, WIDTH] by its ranks; grid (M).

    downs [BLOCK_R, D] are first matrices one below the other.
    """
    row = tl.program_id(0) * BLOCK_M
    squares = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)  # added up across threads at last
    for start in tl.range(0, D, BLOCK_N, num_stages=STAGES):
        tile = _load(x, row, start, M, D, D, BLOCK_M, BLOCK_N).to(tl.float32)
        squares += tile * tile
    scale = rms_scale(tl.sum(squares, 1), D, EPS)[:, None]
    product = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    # Rows are read again, from L2: all their columns are more than registers hold.
    for start in tl.range(0, D, BLOCK_N, num_stages=STAGES):
        tile = _load(x, row, start, M, D, D, BLOCK_M, BLOCK_N)
        tile = _norm_tile(tile, scale, weight, start, D, BLOCK_N, out.dtype.element_ty)
        _store(out, tile, row, start, M, D, WIDTH, BLOCK_M, BLOCK_N)
        matrix = _load(downs, 0, start, BLOCK_R, D, D, BLOCK_R, BLOCK_N)
        product = tl.dot(tile, tl.trans(matrix), product, input_precision=PRECISION)
    _store_ranks(out, product, row, M, D, WIDTH, BLOCK_R, BLOCK_M)


@triton.jit
def add_norm_kernel(
    x, product, up, weight, total, normed, ranks,
    M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a product with its ranks beside it [M, WIDTH], and those times up [D, R], to x [M, D]; norm the total.

    Copy the ranks [M, R], too; grid (M).
    """
    row = tl.program_id(0) * BLOCK_M
    dtype = total.dtype.element_ty
    low_rank = _load(product + D, row, 0, M, R, WIDTH, BLOCK_M, BLOCK_R)
    _store(ranks, low_rank, row, 0, M, R, R, BLOCK_M, BLOCK_R)
    squares = tl.full((BLOCK_M,), 0.0, tl.float32)
    for start in tl.range(0, D, BLOCK_N, num_stages=STAGES):
        tile = _load(x, row, start, M, D, D, BLOCK_M, BLOCK_N).to(tl.float32)
        tile += _load(product, row, start, M, D, WIDTH, BLOCK_M, BLOCK_N).to(tl.float32)
        matrix = _load(up, start, 0, D, R, R, BLOCK_N, BLOCK_R).to(dtype)
        # Onto the float32 sum of stream and product: in 16 bits the adapter's small values would be lost.
        tile = tl.dot(low_rank, tl.trans(matrix), tile, input_precision=PRECISION).to(dtype)
        _store(total, tile, row, start, M, D, D, BLOCK_M, BLOCK_N)
        squares += tl.sum(tile.to(tl.float32) * tile.to(tl.float32), 1)  # of the rounded total, as the reference
    scale = rms_scale(squares, D, EPS)[:, None]
    tl.debug_barrier()  # other threads wrote the total
    for start in tl.range(0, D, BLOCK_N, num_stages=STAGES):
        tile = _load(total, row, start, M, D, D, BLOCK_M, BLOCK_N)
        tile = _norm_tile(tile, scale, weight, start, D, BLOCK_N, dtype)
        _store(normed, tile, row, start, M, D, D, BLOCK_M, BLOCK_N)


@triton.jit
def norm_gradient_kernel(
    x, weight, dresidual, dout, extended, downs, up, dx,
    M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    EPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_U: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a norm's gradient, from that to its result dout [M, WIDTH], to dresidual [M, RESIDUAL]; grid (M).

    With downs [BLOCK_R, D], the result was extended [M, WIDTH] by ranks, its products with them. With up [D, R],
    extend dx [M, OUT] by its product with up.
    """
    row = tl.program_id(0) * BLOCK_M
    dtype = dx.dtype.element_ty
    squares = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    products = squares
    for start in tl.range(0, D, BLOCK_N, num_stages=STAGES):
        tile = _load(x, row, start, M, D, D, BLOCK_M, BLOCK_N).to(tl.float32)
        gradient = _load(dout, row, start, M, D, WIDTH, BLOCK_M, BLOCK_N).to(tl.float32)
        squares += tile * tile
        products += gradient * _weight(weight, start + tl.arange(0, BLOCK_N), D) * tile
    scale, along = rms_scale(tl.sum(squares, 1), D, EPS), tl.sum(products, 1)
    if downs is not None:
        # Ranks are the norm's products with the matrices, so their gradients' share needs no products.
        dranks = _load(dout + D, row, 0, M, WIDTH - D, WIDTH, BLOCK_M, BLOCK_R)
        ranks = _load(extended + D, row, 0, M, WIDTH - D, WIDTH, BLOCK_M, BLOCK_R)
        along += tl.sum(dranks.to(tl.float32) * ranks.to(tl.float32), 1) / scale
    # The part of the gradient along the row, which the norm does not see, needs the row's sum before the second pass.
    along = (along * scale * scale / D)[:, None]
    scale = scale[:, None]
    product = tl.full((BLOCK_M, BLOCK_U), 0.0, tl.float32)
    for start in tl.range(0, D, BLOCK_N, num_stages=STAGES):
        tile = _load(x, row, start, M, D, D, BLOCK_M, BLOCK_N).to(tl.float32)
        gradient = _load(dout, row, start, M, D, WIDTH, BLOCK_M, BLOCK_N).to(tl.float32)
        if downs is not None:
            matrix = _load(downs, 0, start, BLOCK_R, D, D, BLOCK_R, BLOCK_N)
            gradient = tl.dot(dranks, matrix, gradient, input_precision=PRECISION)
        gradient *= _weight(weight, start + tl.arange(0, BLOCK_N), D)
        gradient = (gradient - tile * along) * scale
        gradient += _load(dresidual, row, start, M, D, RESIDUAL, BLOCK_M, BLOCK_N).to(tl.float32)
        gradient = gradient.to(dtype)  # as stored, so that its product with up is the stored values'
        _store(dx, gradient, row, start, M, D, OUT, BLOCK_M, BLOCK_N)
        if up is not None:
            matrix = _load(up, start, 0, D, R, R, BLOCK_N, BLOCK_U).to(dtype)
            product = tl.dot(gradient, matrix, product, input_precision=PRECISION)
    if up is not None:
        _store_ranks(dx, product, row, M, D, OUT, BLOCK_U, BLOCK_M)


@triton.jit
def ranks_kernel(
    partials, out, ranks,
    M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Extend D columns of out [M, WIDTH] by ranks [M, R], the sums of partials [PARTS, M, R]; grid (M)."""
    row = tl.program_id(0) * BLOCK_M
    rows, lanes = row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    inside, at = (rows < M)[:, None] & (lanes < R)[None, :], rows[:, None] * R + lanes[None, :]
    product = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    for first in tl.range(0, PARTS, BLOCK_P, num_stages=STAGES):  # or loads would wait for each other
        parts = first + tl.arange(0, BLOCK_P)
        tile = partials + parts[:, None, None].to(tl.int64) * (M * R) + at[None, :, :]
        mask = (parts < PARTS)[:, None, None] & inside[None, :, :]
        product += tl.sum(tl.load(tile, mask=mask, other=0.0).to(tl.float32), 0)
    _store_ranks(out, product, row, M, D, WIDTH, BLOCK_R, BLOCK_M)
    _store(ranks, product, row, 0, M, R, R, BLOCK_M, BLOCK_R)


@triton.jit
def _aligned(number, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(tl.load(number), ALIGNMENT)


@triton.jit
def extend_weights_kernel(
    table, weights, ups, downs, outs,
    R: tl.constexpr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Extend the rows of many weights by those of their adapters' second matrices, and round the first ones.

    A row of `table` [n, 9] int32 is (number of the weight, its rows, its columns; the output's number, its columns, the
    first row there; the adapter's first rank; the program's first row; whether it is a first matrix, of which the rows
    beyond R are zeros); grid (n).
    """
    row = table + 9 * tl.program_id(0)
    which, count, D = tl.load(row), tl.load(row + 1), _aligned(row + 2, ALIGNMENT)
    width, first, is_first = _aligned(row + 4, ALIGNMENT), tl.load(row + 6), tl.load(row + 8) > 0
    rows, lanes = tl.load(row + 7) + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    inside = (rows < count)[:, None]
    to = _select(outs, tl.load(row + 3), DTYPE) + (tl.load(row + 5) + rows)[:, None].to(tl.int64) * width
    if is_first:
        down = _select(downs, which, tl.float32) + rows[:, None] * D
        for start in tl.range(0, D, BLOCK_N):
            columns = (start + tl.arange(0, BLOCK_N))[None, :]
            value = tl.load(down + columns, mask=(rows < R)[:, None] & (columns < D), other=0.0)
            tl.store(to + columns, value.to(DTYPE), mask=inside & (columns < D))
    else:
        weight = _select(weights, which, DTYPE) + rows[:, None].to(tl.int64) * D
        for start in tl.range(0, D, BLOCK_N):
            columns = (start + tl.arange(0, BLOCK_N))[None, :]
            mask = inside & (columns < D)
            tl.store(to + columns, tl.load(weight + columns, mask=mask), mask=mask)
        rank = (lanes - first)[None, :]
        up = _select(ups, which, tl.float32) + rows[:, None] * R + rank
        ranks = tl.load(up, mask=inside & (rank >= 0) & (rank < R), other=0.0)
        tl.store(to + D + lanes[None, :], ranks.to(DTYPE), mask=inside & (lanes < width - D)[None, :])


@triton.jit
def gradients_kernel(
    table, wides, narrows, partials, outs,
    M: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute wideᵀ·narrow of many pairs, or sum partial results: gradients to adapters; grid (rows of the table).

    A row of `table` [n, 13] int32 is (wide's number, its stride, its first column, its columns; narrow's number, its
    stride, its first rank; the output's number, strides of its columns and ranks; the program's first column; the
    number of an array of partial sums [parts, columns, R] and its parts). A row with parts has no pair.
    """
    row = table + 13 * tl.program_id(0)
    lanes = tl.arange(0, BLOCK_R)
    columns, count = _aligned(row + 10, ALIGNMENT) + tl.arange(0, BLOCK_N), _aligned(row + 3, ALIGNMENT)
    wide_stride, narrow_stride = _aligned(row + 1, ALIGNMENT), _aligned(row + 5, ALIGNMENT)
    wide = _select(wides, tl.load(row), DTYPE) + _aligned(row + 2, ALIGNMENT)
    narrow = _select(narrows, tl.load(row + 4), DTYPE) + _aligned(row + 6, ALIGNMENT)
    mask = (columns < count)[:, None] & (lanes < R)[None, :]
    total = tl.full((BLOCK_N, BLOCK_R), 0.0, tl.float32)
    # A row has a pair or partial sums, so one of the two loops takes no turn.
    partial, parts = _select(partials, tl.load(row + 11), tl.float32), tl.load(row + 12)
    for part in tl.range(0, parts):
        at = (part * count + columns[:, None]) * R + lanes[None, :]
        total += tl.load(partial + at, mask=mask, other=0.0)
    rows, stop = tl.arange(0, BLOCK_M)[:, None], tl.where(parts > 0, 0, M)
    # Offsets within a tile are 32-bit and the same in every turn; only those of its first row may need 64 bits.
    wide_at, narrow_at = rows * wide_stride + columns[None, :], rows * narrow_stride + lanes[None, :]
    for start in tl.range(0, stop, BLOCK_M, num_stages=STAGES):
        inside, at = rows < M - start, tl.cast(start, tl.int64)
        values = tl.load(wide + at * wide_stride + wide_at, mask=inside & (columns < count)[None, :], other=0.0)
        others = tl.load(narrow + at * narrow_stride + narrow_at, mask=inside & (lanes < R)[None, :], other=0.0)
        total = tl.dot(tl.trans(values), others, total, input_precision=PRECISION)
    out = _select(outs, tl.load(row + 7), tl.float32)
    to = out + columns[:, None] * tl.load(row + 8) + lanes[None, :] * tl.load(row + 9)
    tl.store(to, total, mask=mask)
