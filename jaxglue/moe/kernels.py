"""Triton kernels of the experts' matmuls: rows times their group's matrix, and a group's sum of outer products.

Rows of a group are consecutive. A program of `matmul_kernel` makes one tile of the output, whose rows all belong to
one group: a table, made once on the device, says which. The grid has a program for as many tiles as any sizes could
need; those beyond the needed ones end at once.

Layout: lhs [S, K], rhs [E, K, N] or, transposed, [E, N, K]; offsets [E+1]; table [2, TILES], the group and first row of
each tile. Offsets of matrices are 64-bit. With DESCRIPTORS (compute capability ≥ 9.0), tiles are loaded through TMA,
which fills with zeros past the end of an array; rows of another group are loaded too and never stored.
"""

import triton
import triton.language as tl


@triton.jit
def _banded(program, TILES_M: tl.constexpr, TILES_N: tl.constexpr, BAND: tl.constexpr):
    """(row tile, column tile) of a program: bands of BAND row tiles, so that what runs at one time shares its loads."""
    band = program // (BAND * TILES_N)
    height = tl.minimum(TILES_M - band * BAND, BAND)
    within = program % (BAND * TILES_N)
    return band * BAND + within % height, within // height


@triton.jit
def _load(source, first, end, column, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
          DESCRIPTOR: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_R, BLOCK_C] of rows [first, end) of a [S, COLUMNS] array."""
    if DESCRIPTOR:
        return source.load([first, column])
    else:
        rows, columns = first + tl.arange(0, BLOCK_R), column + tl.arange(0, BLOCK_C)
        mask = (rows < end)[:, None]
        if COLUMNS % BLOCK_C != 0:
            mask = mask & (columns < COLUMNS)[None, :]
        offsets = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        return tl.load(source + offsets, mask=mask, other=0.0)


@triton.jit
def _load_matrix(source, group, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_C: tl.constexpr, DESCRIPTOR: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_R, BLOCK_C] of one matrix of a [E, ROWS, COLUMNS] array."""
    if DESCRIPTOR:
        return source.load([group, row, column]).reshape(BLOCK_R, BLOCK_C)
    else:
        matrix = source + group.to(tl.int64) * ROWS * COLUMNS
        return _load(matrix, row, ROWS, column, COLUMNS, BLOCK_R, BLOCK_C, False)


@triton.jit
def _matmul_tile(
    lhs, rhs, bias, hidden, expand, out, group, first, end, column,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TRANSPOSE_RHS: tl.constexpr, TRANSPOSE_EXPAND: tl.constexpr,
    HAS_BIAS: tl.constexpr, DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows [first, end) of a group, at most BLOCK_M, and BLOCK_N columns of out."""
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for k in range(0, K, BLOCK_K):
        a = _load(lhs, first, end, k, K, BLOCK_M, BLOCK_K, DESCRIPTORS)
        if TRANSPOSE_RHS:
            b = tl.trans(_load_matrix(rhs, group, column, k, N, K, BLOCK_N, BLOCK_K, DESCRIPTORS))
        else:
            b = _load_matrix(rhs, group, k, column, K, N, BLOCK_K, BLOCK_N, DESCRIPTORS)
        acc = tl.dot(a, b, acc)
    for r in tl.static_range(0, R, BLOCK_R):
        a = _load(hidden, first, end, r, R, BLOCK_M, BLOCK_R, False)
        if TRANSPOSE_EXPAND:
            b = tl.trans(_load_matrix(expand, group, column, r, N, R, BLOCK_N, BLOCK_R, False))
        else:
            b = _load_matrix(expand, group, r, column, R, N, BLOCK_R, BLOCK_N, False)
        acc = tl.dot(a, b, acc)
    rows, columns = first + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + group * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def matmul_kernel(
    lhs, rhs, tail, bias, hidden, expand, table, offsets, out,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
    TRANSPOSE_RHS: tl.constexpr, TRANSPOSE_EXPAND: tl.constexpr, HAS_BIAS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """One tile of out [S, N]; grid (TILES · column tiles).

    With R > 0, hidden [S, R] times expand [E, R, N] joins the sum as its last step: an adapter costs no pass over out.
    With BLOCK_TAIL > 0, the last column tile is that narrow; `tail` is rhs again, for a descriptor knows its tile.
    """
    tile, column_tile = _banded(tl.program_id(0), TILES, tl.cdiv(N, BLOCK_N), BAND)
    group = tl.load(table + tile)
    if group == E:
        return
    first, end = tl.load(table + TILES + tile), tl.load(offsets + group + 1)
    column = column_tile * BLOCK_N
    if (BLOCK_TAIL > 0) & (column + BLOCK_N > N):
        _matmul_tile(lhs, tail, bias, hidden, expand, out, group, first, end, column,
                     K, N, R, TRANSPOSE_RHS, TRANSPOSE_EXPAND, HAS_BIAS, DESCRIPTORS,
                     BLOCK_M, BLOCK_TAIL if BLOCK_TAIL > 0 else BLOCK_N, BLOCK_K, BLOCK_R)  # fmt: skip
    else:
        _matmul_tile(lhs, rhs, bias, hidden, expand, out, group, first, end, column,
                     K, N, R, TRANSPOSE_RHS, TRANSPOSE_EXPAND, HAS_BIAS, DESCRIPTORS,
                     BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R)  # fmt: skip


@triton.jit
def outer_kernel(
    lhs, rhs, offsets, out,
    K: tl.constexpr, N: tl.constexpr, DESCRIPTORS: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M, BLOCK_N] of out [E, K, N], summed over the rows of a group; grid (tiles of a matrix, E)."""
    row_tile, column_tile = _banded(tl.program_id(0), tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N), BAND)
    group = tl.program_id(1)
    first, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    whole = first + (end - first) // BLOCK_K * BLOCK_K
    for s in range(first, whole, BLOCK_K):
        a = _load(lhs, s, end, row, K, BLOCK_K, BLOCK_M, DESCRIPTORS)
        b = _load(rhs, s, end, column, N, BLOCK_K, BLOCK_N, DESCRIPTORS)
        acc = tl.dot(tl.trans(a), b, acc)
    if whole < end:
        a = _load(lhs, whole, end, row, K, BLOCK_K, BLOCK_M, DESCRIPTORS)
        b = _load(rhs, whole, end, column, N, BLOCK_K, BLOCK_N, DESCRIPTORS)
        ours = (whole + tl.arange(0, BLOCK_K) < end)[:, None]
        acc = tl.dot(tl.trans(tl.where(ours, a, 0.0)), tl.where(ours, b, 0.0), acc)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    mask = (rows < K)[:, None] & (columns < N)[None, :]
    offset = group.to(tl.int64) * K * N
    tl.store(out + offset + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)
