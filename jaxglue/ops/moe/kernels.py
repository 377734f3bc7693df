"""Triton kernels of the experts' matmuls: rows times their group's matrix, and a group's sum of outer products.

Rows of a group are consecutive. A program of `matmul_kernel` makes one tile of the output, whose rows all belong to
one group: a table, made once on the device, says which. The grid has a program for as many tiles as any sizes could
need; those beyond the needed ones end at once.

Layout: lhs [S, K], rhs [E, K, N] or, transposed, [E, N, K]; offsets [E+1]; table [4, TILES], see `RowTiles`. Offsets of
matrices are 64-bit. With DESCRIPTORS (compute capability ≥ 9.0), tiles are loaded through TMA, which fills with zeros
past the end of an array; rows of another group are loaded too and never stored.
"""

import triton
import triton.language as tl


@triton.jit
def _banded(program, tiles_m, TILES_N: tl.constexpr, BAND: tl.constexpr):
    """(row tile, column tile) of a program: bands of BAND row tiles, so that what runs at one time shares its loads."""
    GROUP_M = program // (BAND * TILES_N)
    height = tl.minimum(tiles_m - GROUP_M * BAND, BAND)
    within = program % (BAND * TILES_N)
    return GROUP_M * BAND + within % height, within // height


@triton.jit
def _rows(tokens, first, end, BLOCK_R: tl.constexpr, GATHER: tl.constexpr):
    """(which rows of an array the rows [first, end) of a tile are, which of them the tile has)."""
    rows = first + tl.arange(0, BLOCK_R)
    if GATHER:
        return tl.load(tokens + rows, mask=rows < end, other=0), rows < end
    else:
        return rows, rows < end


@triton.jit
def _load_rows(source, rows, inside, column, COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tile of BLOCK_C columns of some rows of an array with COLUMNS columns."""
    columns = column + tl.arange(0, BLOCK_C)
    mask = inside[:, None]
    if COLUMNS % BLOCK_C != 0:
        mask = mask & (columns < COLUMNS)[None, :]
    return tl.load(source + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load(source, tokens, first, end, column, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
          DESCRIPTOR: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_R, BLOCK_C] of rows [first, end) of a [S, COLUMNS] array, or of rows that tokens names."""
    if DESCRIPTOR:
        return source.load([first, column])
    else:
        rows, inside = _rows(tokens, first, end, BLOCK_R, GATHER)
        return _load_rows(source, rows, inside, column, COLUMNS, BLOCK_C)


@triton.jit
def _load_matrix(source, group, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_C: tl.constexpr, DESCRIPTOR: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_R, BLOCK_C] of one matrix of a [E, ROWS, COLUMNS] array."""
    if DESCRIPTOR:
        return source.load([group, row, column]).reshape(BLOCK_R, BLOCK_C)
    else:
        matrix, rows = source + group.to(tl.int64) * ROWS * COLUMNS, row + tl.arange(0, BLOCK_R)
        return _load_rows(matrix, rows, rows < ROWS, column, COLUMNS, BLOCK_C)


@triton.jit
def _finish(acc, bias, out, group, row, end, column, N: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    """Adds the bias to a sum and stores its rows [row, end)."""
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + group * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_tile(
    lhs, more_lhs, rhs, tokens, bias, hidden, expand, out, group, first, end, column,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TRANSPOSE_RHS: tl.constexpr, TRANSPOSE_EXPAND: tl.constexpr,
    GATHER: tl.constexpr, HAS_BIAS: tl.constexpr, DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_MORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows [first, end) of a group, at most BLOCK_M + BLOCK_MORE, and BLOCK_N columns of out."""
    TMA: tl.constexpr = DESCRIPTORS and not GATHER
    second = first + BLOCK_M
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    sources, inside = _rows(tokens, first, end, BLOCK_M, GATHER)
    if BLOCK_MORE > 0:
        more = tl.full((BLOCK_MORE, BLOCK_N), 0.0, tl.float32)
        more_sources, more_inside = _rows(tokens, second, end, BLOCK_MORE, GATHER)
    for k in range(0, K, BLOCK_K):
        a = lhs.load([first, k]) if TMA else _load_rows(lhs, sources, inside, k, K, BLOCK_K)
        if TRANSPOSE_RHS:
            b = tl.trans(_load_matrix(rhs, group, column, k, N, K, BLOCK_N, BLOCK_K, DESCRIPTORS))
        else:
            b = _load_matrix(rhs, group, k, column, K, N, BLOCK_K, BLOCK_N, DESCRIPTORS)
        acc = tl.dot(a, b, acc)
        if BLOCK_MORE > 0:
            a = more_lhs.load([second, k]) if TMA else _load_rows(more_lhs, more_sources, more_inside, k, K, BLOCK_K)
            more = tl.dot(a, b, more)
    for r in tl.static_range(0, R, BLOCK_R):
        a = _load(hidden, hidden, first, end, r, R, BLOCK_M, BLOCK_R, False, False)
        if TRANSPOSE_EXPAND:
            b = tl.trans(_load_matrix(expand, group, column, r, N, R, BLOCK_N, BLOCK_R, False))
        else:
            b = _load_matrix(expand, group, r, column, R, N, BLOCK_R, BLOCK_N, False)
        acc = tl.dot(a, b, acc)
        if BLOCK_MORE > 0:
            more = tl.dot(_load(hidden, hidden, second, end, r, R, BLOCK_MORE, BLOCK_R, False, False), b, more)
    _finish(acc, bias, out, group, first, end, column, N, HAS_BIAS, BLOCK_M, BLOCK_N)
    if BLOCK_MORE > 0:
        _finish(more, bias, out, group, second, end, column, N, HAS_BIAS, BLOCK_MORE, BLOCK_N)


@triton.jit
def matmul_kernel(
    lhs, half, rhs, tail, tokens, bias, hidden, expand, table, out,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
    TRANSPOSE_RHS: tl.constexpr, TRANSPOSE_EXPAND: tl.constexpr, GATHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_MORE: tl.constexpr,
):  # fmt: skip
    """One tile of out [S, N]; grid (TILES · column tiles).

    To GATHER, lhs is [M, K] and tokens [S] names the row of it that a row of the sum is.
    With R > 0, hidden [S, R] times expand [E, R, N] joins the sum as its last step: an adapter costs no pass over out.
    The last column tile has BLOCK_TAIL columns; a tile with no more than BLOCK_HALF rows computes no more. With
    BLOCK_MORE = BLOCK_HALF, a tile has as many rows more, in a second sum that shares what is loaded of the matrix.
    `tail` and `half` are rhs and lhs again, for a descriptor knows its tile.
    """
    COLUMNS: tl.constexpr = tl.cdiv(N, BLOCK_N)
    table += tl.program_id(0) // COLUMNS
    group, start = tl.load(table), tl.load(table + TILES)
    end, before = tl.load(table + 2 * TILES), tl.load(table + 3 * TILES)
    if group == E:
        return
    tiles = tl.cdiv(end - start, BLOCK_M + BLOCK_MORE)
    tile, column_tile = _banded(tl.program_id(0) - before * COLUMNS, tiles, COLUMNS, BAND)
    first, column = start + tile * (BLOCK_M + BLOCK_MORE), column_tile * BLOCK_N
    if (BLOCK_TAIL < BLOCK_N) & (column + BLOCK_N > N):
        _matmul_tile(lhs, half, tail, tokens, bias, hidden, expand, out, group, first, end, column,
                     K, N, R, TRANSPOSE_RHS, TRANSPOSE_EXPAND, GATHER, HAS_BIAS, DESCRIPTORS,
                     BLOCK_M, BLOCK_MORE, BLOCK_TAIL, BLOCK_K, BLOCK_R)  # fmt: skip
    elif (BLOCK_HALF < BLOCK_M) & (end - first <= BLOCK_HALF):
        _matmul_tile(half, half, rhs, tokens, bias, hidden, expand, out, group, first, end, column,
                     K, N, R, TRANSPOSE_RHS, TRANSPOSE_EXPAND, GATHER, HAS_BIAS, DESCRIPTORS,
                     BLOCK_HALF, 0, BLOCK_N, BLOCK_K, BLOCK_R)  # fmt: skip
    elif (BLOCK_MORE > 0) & (end - first <= BLOCK_M):
        _matmul_tile(lhs, half, rhs, tokens, bias, hidden, expand, out, group, first, end, column,
                     K, N, R, TRANSPOSE_RHS, TRANSPOSE_EXPAND, GATHER, HAS_BIAS, DESCRIPTORS,
                     BLOCK_M, 0, BLOCK_N, BLOCK_K, BLOCK_R)  # fmt: skip
    else:
        _matmul_tile(lhs, half, rhs, tokens, bias, hidden, expand, out, group, first, end, column,
                     K, N, R, TRANSPOSE_RHS, TRANSPOSE_EXPAND, GATHER, HAS_BIAS, DESCRIPTORS,
                     BLOCK_M, BLOCK_MORE, BLOCK_N, BLOCK_K, BLOCK_R)  # fmt: skip


@triton.jit
def outer_kernel(
    lhs, rhs, lhs_tokens, rhs_tokens, offsets, out,
    K: tl.constexpr, N: tl.constexpr, DESCRIPTORS: tl.constexpr, GATHER_LHS: tl.constexpr, GATHER_RHS: tl.constexpr,
    BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M, BLOCK_N] of out [E, K, N], summed over the rows of a group; grid (tiles of a matrix, E)."""
    TMA_LHS: tl.constexpr = DESCRIPTORS and not GATHER_LHS
    TMA_RHS: tl.constexpr = DESCRIPTORS and not GATHER_RHS
    row_tile, column_tile = _banded(tl.program_id(0), tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N), BAND)
    group = tl.program_id(1)
    first, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    whole = first + (end - first) // BLOCK_K * BLOCK_K
    for s in range(first, whole, BLOCK_K):
        a = _load(lhs, lhs_tokens, s, end, row, K, BLOCK_K, BLOCK_M, TMA_LHS, GATHER_LHS)
        b = _load(rhs, rhs_tokens, s, end, column, N, BLOCK_K, BLOCK_N, TMA_RHS, GATHER_RHS)
        acc = tl.dot(tl.trans(a), b, acc)
    if whole < end:
        a = _load(lhs, lhs_tokens, whole, end, row, K, BLOCK_K, BLOCK_M, TMA_LHS, GATHER_LHS)
        b = _load(rhs, rhs_tokens, whole, end, column, N, BLOCK_K, BLOCK_N, TMA_RHS, GATHER_RHS)
        ours = (whole + tl.arange(0, BLOCK_K) < end)[:, None]
        acc = tl.dot(tl.trans(tl.where(ours, a, 0.0)), tl.where(ours, b, 0.0), acc)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    mask = (rows < K)[:, None] & (columns < N)[None, :]
    offset = group.to(tl.int64) * K * N
    tl.store(out + offset + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)
