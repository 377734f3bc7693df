"""Triton kernels of the experts: rows times their group's matrix, a group's sum of outer products, the activations.

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
def matmul_kernel(
    lhs, rhs, bias, hidden, expand, table, offsets, out,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
    TRANSPOSE_RHS: tl.constexpr, TRANSPOSE_EXPAND: tl.constexpr, HAS_BIAS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M, BLOCK_N] of out [S, N]; grid (TILES · column tiles).

    With R > 0, hidden [S, R] times expand [E, R, N] joins the sum as its last step: an adapter costs no pass over out.
    """
    tile, column_tile = _banded(tl.program_id(0), TILES, tl.cdiv(N, BLOCK_N), BAND)
    group = tl.load(table + tile)
    if group == E:
        return
    first, end = tl.load(table + TILES + tile), tl.load(offsets + group + 1)
    column = column_tile * BLOCK_N
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


@triton.jit
def _gate_up(projected, start, F: tl.constexpr, GPT_OSS: tl.constexpr, BLOCK: tl.constexpr):
    """(gate, up) of BLOCK columns of a row, in float32: alternating for GPT-OSS, else in two halves."""
    if GPT_OSS:
        columns = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(projected + columns, mask=columns < 2 * F, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        columns = start + tl.arange(0, BLOCK)
        gate = tl.load(projected + columns, mask=columns < F, other=0.0)
        up = tl.load(projected + F + columns, mask=columns < F, other=0.0)
        return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _activate(gate, up, GPT_OSS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """(value, its derivative by gate, by up)."""
    if GPT_OSS:
        low, inside = gate <= LIMIT, (up >= -LIMIT) & (up <= LIMIT)
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * gate))
        by_gate = tl.where(low, up * sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid)), 0.0)
        return gate * sigmoid * up, by_gate, tl.where(inside, gate * sigmoid, 0.0)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        return gate * sigmoid * up, up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), gate * sigmoid


@triton.jit
def activation_kernel(
    projected, weights, out,
    F: tl.constexpr, GPT_OSS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of out [S, F]: the activation of projected [S, 2F] times the row's weight; grid (S)."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    for start in range(0, F, BLOCK):
        gate, up = _gate_up(projected + row * 2 * F, start, F, GPT_OSS, BLOCK)
        value, _, _ = _activate(gate, up, GPT_OSS, ALPHA, LIMIT)
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + row * F + columns, (value * weight).to(out.dtype.element_ty), mask=columns < F)


@triton.jit
def activation_gradient_kernel(
    projected, weights, dout, dprojected, dweights,
    F: tl.constexpr, GPT_OSS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of dprojected [S, 2F] and of dweights [S]; grid (S)."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    dweight = tl.full((BLOCK,), 0.0, tl.float32)
    dprojected += row * 2 * F
    for start in range(0, F, BLOCK):
        gate, up = _gate_up(projected + row * 2 * F, start, F, GPT_OSS, BLOCK)
        value, by_gate, by_up = _activate(gate, up, GPT_OSS, ALPHA, LIMIT)
        columns = start + tl.arange(0, BLOCK)
        grad = tl.load(dout + row * F + columns, mask=columns < F, other=0.0).to(tl.float32)
        dweight += grad * value
        dgate = (grad * weight * by_gate).to(dprojected.dtype.element_ty)
        dup = (grad * weight * by_up).to(dprojected.dtype.element_ty)
        if GPT_OSS:
            both, columns = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,)), 2 * start + tl.arange(0, 2 * BLOCK)
            tl.store(dprojected + columns, both, mask=columns < 2 * F)
        else:
            tl.store(dprojected + columns, dgate, mask=columns < F)
            tl.store(dprojected + F + columns, dup, mask=columns < F)
    tl.store(dweights + row, tl.sum(dweight, 0))
