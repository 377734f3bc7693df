"""Triton kernels: grouped matmuls, sums of outer products by group, gated activations, sums of each token's rows.

Rows of a group are consecutive. A program of `matmul_kernel` computes one tile of the output, with rows of one group
as `RowTiles` tabulates them; programs without a tile return at once.

Layout: lhs [S, K], rhs [E, K, N] or, transposed, [E, N, K]; offsets [E+1]; table [4, TILES]. Offsets of matrices are
64-bit. With DESCRIPTORS (compute capability ≥ 9.0), tiles load through TMA, which fills with zeros past the end of an
array; a tile may load rows of the next group but never stores them. An argument that a call has no use for is None,
and its part of the kernel is not compiled.
"""

import triton
import triton.language as tl


@triton.jit
def _swizzle(program, tiles_m, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return (row tile, column tile) of a program: GROUP_M row tiles take each column in turn, to share loads in L2."""
    band = program // (GROUP_M * TILES_N)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * TILES_N)
    return band * GROUP_M + within % height, within // height


@triton.jit
def _rows(tokens, first, end, BLOCK_R: tl.constexpr):
    """Return (source row of each row of a tile, mask of the rows before `end`)."""
    rows = first + tl.arange(0, BLOCK_R)
    if tokens is not None:
        return tl.load(tokens + rows, mask=rows < end, other=0), rows < end
    else:
        return rows, rows < end


@triton.jit
def _load_rows(source, rows, inside, column, COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load BLOCK_C columns of the given rows of an array with COLUMNS columns."""
    columns = column + tl.arange(0, BLOCK_C)
    mask = inside[:, None]
    if COLUMNS % BLOCK_C != 0:
        mask = mask & (columns < COLUMNS)[None, :]
    return tl.load(source + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load(source, tokens, first, end, column, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
          DESCRIPTOR: tl.constexpr):  # fmt: skip
    """Load a tile [BLOCK_R, BLOCK_C] of rows [first, end) of an array [S, COLUMNS], through `tokens` if any."""
    if DESCRIPTOR:
        return source.load([first, column])
    else:
        rows, inside = _rows(tokens, first, end, BLOCK_R)
        return _load_rows(source, rows, inside, column, COLUMNS, BLOCK_C)


@triton.jit
def _load_matrix(source, group, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_C: tl.constexpr, DESCRIPTOR: tl.constexpr):  # fmt: skip
    """Load a tile [BLOCK_R, BLOCK_C] of one matrix of an array [E, ROWS, COLUMNS]."""
    if DESCRIPTOR:
        return source.load([group, row, column]).reshape(BLOCK_R, BLOCK_C)
    else:
        matrix, rows = source + group.to(tl.int64) * ROWS * COLUMNS, row + tl.arange(0, BLOCK_R)
        return _load_rows(matrix, rows, rows < ROWS, column, COLUMNS, BLOCK_C)


@triton.jit
def _finish(acc, bias, out, group, row, end, column, N: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    """Add the bias, if any, to an accumulator and store its rows [row, end)."""
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    mask = (rows < end)[:, None] & (columns < N)[None, :]  # a tile through TMA may hold rows of the next group
    if bias is not None:
        acc += tl.load(bias + group * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_tile(
    lhs, more_lhs, rhs, tokens, bias, low_rank, expand, row_scales, factors, out, group, first, end, column,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TRANSPOSE_RHS: tl.constexpr, TRANSPOSE_EXPAND: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_MORE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute rows [first, end) of a group, at most BLOCK_M + BLOCK_MORE, in BLOCK_N columns of out."""
    TMA: tl.constexpr = DESCRIPTORS and tokens is None
    second = first + BLOCK_M
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    sources, inside = _rows(tokens, first, end, BLOCK_M)
    if BLOCK_MORE > 0:
        # Blocks are powers of two: tiles of 192 rows have accumulators of 128 and 64.
        more = tl.full((BLOCK_MORE, BLOCK_N), 0.0, tl.float32)
        more_sources, more_inside = _rows(tokens, second, end, BLOCK_MORE)
    for k in range(0, K, BLOCK_K):
        a = lhs.load([first, k]) if TMA else _load_rows(lhs, sources, inside, k, K, BLOCK_K)
        if TRANSPOSE_RHS:
            b = tl.trans(_load_matrix(rhs, group, column, k, N, K, BLOCK_N, BLOCK_K, DESCRIPTORS))
        else:
            b = _load_matrix(rhs, group, k, column, K, N, BLOCK_K, BLOCK_N, DESCRIPTORS)
        acc = tl.dot(a, b, acc)
        if BLOCK_MORE > 0:
            # The matrix's tile is loaded once for both accumulators.
            a = more_lhs.load([second, k]) if TMA else _load_rows(more_lhs, more_sources, more_inside, k, K, BLOCK_K)
            more = tl.dot(a, b, more)
    if row_scales is not None:
        # Before the adapter's product, which is of 16-bit values.
        factor = tl.load(factors + group)
        acc *= (tl.load(row_scales + sources, mask=inside, other=0.0) * factor)[:, None]
        if BLOCK_MORE > 0:
            more *= (tl.load(row_scales + more_sources, mask=more_inside, other=0.0) * factor)[:, None]
    # Without descriptors, as R values may be no whole 16 bytes. The sum goes on in the accumulator and is rounded once.
    for r in tl.static_range(0, R, BLOCK_R):
        a = _load(low_rank, None, first, end, r, R, BLOCK_M, BLOCK_R, False)
        if TRANSPOSE_EXPAND:
            b = tl.trans(_load_matrix(expand, group, column, r, N, R, BLOCK_N, BLOCK_R, False))
        else:
            b = _load_matrix(expand, group, r, column, R, N, BLOCK_R, BLOCK_N, False)
        acc = tl.dot(a, b, acc)
        if BLOCK_MORE > 0:
            more = tl.dot(_load(low_rank, None, second, end, r, R, BLOCK_MORE, BLOCK_R, False), b, more)
    _finish(acc, bias, out, group, first, end, column, N, BLOCK_M, BLOCK_N)
    if BLOCK_MORE > 0:
        _finish(more, bias, out, group, second, end, column, N, BLOCK_MORE, BLOCK_N)


@triton.jit
def matmul_kernel(
    lhs, half, rhs, tail, tokens, bias, low_rank, expand, table, row_scales, factors, out,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
    TRANSPOSE_RHS: tl.constexpr, TRANSPOSE_EXPAND: tl.constexpr, DESCRIPTORS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_TAIL: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_MORE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out [S, N]; grid (TILES · column tiles).

    With tokens [S], lhs is [M, K], and they are the rows of lhs for each row of out, gathered as they are loaded.
    With row_scales, one for each row of lhs, and factors [E], these multiply the products of 8-bit values.
    With R > 0, low_rank [S, R] · expand [E, R, N] is the last step of the sum: an adapter needs no pass over out.
    The last column tile has BLOCK_TAIL columns; a tile of at most BLOCK_HALF rows computes no more. With BLOCK_MORE =
    BLOCK_HALF, a tile has a second accumulator of as many further rows that shares the loads of the matrix.
    `tail` and `half` are rhs and lhs again, because a TMA descriptor holds its tile's size.
    """
    COLUMNS: tl.constexpr = tl.cdiv(N, BLOCK_N)
    table += tl.program_id(0) // COLUMNS
    group, start = tl.load(table), tl.load(table + TILES)
    end, before = tl.load(table + 2 * TILES), tl.load(table + 3 * TILES)
    if group == E:  # the grid has room for the most tiles that groups of any sizes could need
        return
    tiles = tl.cdiv(end - start, BLOCK_M + BLOCK_MORE)
    tile, column_tile = _swizzle(tl.program_id(0) - before * COLUMNS, tiles, COLUMNS, GROUP_M)
    first, column = start + tile * (BLOCK_M + BLOCK_MORE), column_tile * BLOCK_N
    # Sizes of tiles are constants, so each case is a loop of its own.
    if (BLOCK_TAIL < BLOCK_N) & (column + BLOCK_N > N):
        _matmul_tile(
            lhs=lhs, more_lhs=half, rhs=tail, tokens=tokens, bias=bias, low_rank=low_rank, expand=expand,
            row_scales=row_scales, factors=factors, out=out, group=group, first=first, end=end, column=column, K=K,
            N=N, R=R, TRANSPOSE_RHS=TRANSPOSE_RHS, TRANSPOSE_EXPAND=TRANSPOSE_EXPAND, DESCRIPTORS=DESCRIPTORS,
            BLOCK_M=BLOCK_M, BLOCK_MORE=BLOCK_MORE, BLOCK_N=BLOCK_TAIL, BLOCK_K=BLOCK_K, BLOCK_R=BLOCK_R,
        )  # fmt: skip
    elif (BLOCK_HALF < BLOCK_M) & (end - first <= BLOCK_HALF):
        _matmul_tile(
            lhs=half, more_lhs=half, rhs=rhs, tokens=tokens, bias=bias, low_rank=low_rank, expand=expand,
            row_scales=row_scales, factors=factors, out=out, group=group, first=first, end=end, column=column, K=K,
            N=N, R=R, TRANSPOSE_RHS=TRANSPOSE_RHS, TRANSPOSE_EXPAND=TRANSPOSE_EXPAND, DESCRIPTORS=DESCRIPTORS,
            BLOCK_M=BLOCK_HALF, BLOCK_MORE=0, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, BLOCK_R=BLOCK_R,
        )  # fmt: skip
    elif (BLOCK_MORE > 0) & (end - first <= BLOCK_M):
        _matmul_tile(
            lhs=lhs, more_lhs=half, rhs=rhs, tokens=tokens, bias=bias, low_rank=low_rank, expand=expand,
            row_scales=row_scales, factors=factors, out=out, group=group, first=first, end=end, column=column, K=K,
            N=N, R=R, TRANSPOSE_RHS=TRANSPOSE_RHS, TRANSPOSE_EXPAND=TRANSPOSE_EXPAND, DESCRIPTORS=DESCRIPTORS,
            BLOCK_M=BLOCK_M, BLOCK_MORE=0, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, BLOCK_R=BLOCK_R,
        )  # fmt: skip
    else:
        _matmul_tile(
            lhs=lhs, more_lhs=half, rhs=rhs, tokens=tokens, bias=bias, low_rank=low_rank, expand=expand,
            row_scales=row_scales, factors=factors, out=out, group=group, first=first, end=end, column=column, K=K,
            N=N, R=R, TRANSPOSE_RHS=TRANSPOSE_RHS, TRANSPOSE_EXPAND=TRANSPOSE_EXPAND, DESCRIPTORS=DESCRIPTORS,
            BLOCK_M=BLOCK_M, BLOCK_MORE=BLOCK_MORE, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, BLOCK_R=BLOCK_R,
        )  # fmt: skip


@triton.jit
def outer_kernel(
    lhs, rhs, lhs_tokens, rhs_tokens, offsets, out,
    K: tl.constexpr, N: tl.constexpr, DESCRIPTORS: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile [BLOCK_M, BLOCK_N] of out [E, K, N], summed over a group's rows; grid (tiles of a matrix, E)."""
    TMA_LHS: tl.constexpr = DESCRIPTORS and lhs_tokens is None
    TMA_RHS: tl.constexpr = DESCRIPTORS and rhs_tokens is None
    row_tile, column_tile = _swizzle(tl.program_id(0), tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    group = tl.program_id(1)
    first, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    full_end = first + (end - first) // BLOCK_K * BLOCK_K
    for s in range(first, full_end, BLOCK_K):
        a = _load(lhs, lhs_tokens, s, end, row, K, BLOCK_K, BLOCK_M, TMA_LHS)
        b = _load(rhs, rhs_tokens, s, end, column, N, BLOCK_K, BLOCK_N, TMA_RHS)
        acc = tl.dot(tl.trans(a), b, acc)
    if full_end < end:  # apart from the loop, whose steps need no mask; TMA would load rows of the next group here
        a = _load(lhs, lhs_tokens, full_end, end, row, K, BLOCK_K, BLOCK_M, TMA_LHS)
        b = _load(rhs, rhs_tokens, full_end, end, column, N, BLOCK_K, BLOCK_N, TMA_RHS)
        ours = (full_end + tl.arange(0, BLOCK_K) < end)[:, None]
        acc = tl.dot(tl.trans(tl.where(ours, a, 0.0)), tl.where(ours, b, 0.0), acc)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    mask = (rows < K)[:, None] & (columns < N)[None, :]
    offset = group.to(tl.int64) * K * N
    tl.store(out + offset + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_up(projected, start, F: tl.constexpr, GPT_OSS: tl.constexpr, BLOCK: tl.constexpr):
    """Load (gate, up) of BLOCK columns of a row in float32: alternating for GPT-OSS, else in two halves."""
    if GPT_OSS:
        columns = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(projected + columns, mask=columns < 2 * F, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (BLOCK, 2)))  # one contiguous load in place of two with strides
    else:
        columns = start + tl.arange(0, BLOCK)
        gate = tl.load(projected + columns, mask=columns < F, other=0.0)
        up = tl.load(projected + F + columns, mask=columns < F, other=0.0)
        return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def activate(gate, up, GPT_OSS: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return (value, derivative by gate, derivative by up)."""
    if GPT_OSS:
        # The gate is clamped from above alone; values beyond a limit have no gradient.
        low, inside = gate <= LIMIT, (up >= -LIMIT) & (up <= LIMIT)
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * gate))
        by_gate = tl.where(low, up * sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid)), 0.0)
        return gate * sigmoid * up, by_gate, tl.where(inside, gate * sigmoid, 0.0)
    elif GELU:  # (1 + tanh(z)) / 2 = sigmoid(2z), of z = sqrt(2 / pi) · (g + 0.044715 · g³)
        square = gate * gate
        sigmoid = 1.0 / (1.0 + tl.exp(-1.5957691216 * gate * (1.0 + 0.044715 * square)))
        slope = 1.5957691216 * gate * (1.0 + 0.134145 * square)
        return gate * sigmoid * up, up * sigmoid * (1.0 + slope * (1.0 - sigmoid)), gate * sigmoid
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))  # 0 where the exponential overflows to infinity
        return gate * sigmoid * up, up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), gate * sigmoid


@triton.jit
def _squared(projected, start, F: tl.constexpr, BLOCK: tl.constexpr):
    """Return (max(x, 0)², its derivative) of BLOCK columns of a row."""
    columns = start + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(projected + columns, mask=columns < F, other=0.0).to(tl.float32), 0.0)
    return positive * positive, 2.0 * positive


@triton.jit
def activation_kernel(
    projected, weights, offsets, out,
    E: tl.constexpr, F: tl.constexpr, GPT_OSS: tl.constexpr, GELU: tl.constexpr, RELU2: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of out [S, F], the activation of projected [S, 2F] times the row's weight; grid (S).

    RELU2 has no gate, and projected is [S, F]. Rows from offsets[E] on belong to no group and are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + E):
        return
    weight = tl.load(weights + row)
    for start in range(0, F, BLOCK):
        if RELU2:
            value, _ = _squared(projected + row * F, start, F, BLOCK)
        else:
            gate, up = _gate_up(projected + row * 2 * F, start, F, GPT_OSS, BLOCK)
            value, _, _ = activate(gate, up, GPT_OSS, GELU, ALPHA, LIMIT)
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + row * F + columns, (value * weight).to(out.dtype.element_ty), mask=columns < F)


@triton.jit
def activation_gradient_kernel(
    projected, weights, offsets, dout, dprojected, dweights,
    E: tl.constexpr, F: tl.constexpr, GPT_OSS: tl.constexpr, GELU: tl.constexpr, RELU2: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of dprojected [S, 2F] and of dweights [S], where it belongs to a group; grid (S)."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + E):
        return
    weight = tl.load(weights + row)
    dweight = tl.full((BLOCK,), 0.0, tl.float32)  # added up across threads at last
    dprojected += row * (F if RELU2 else 2 * F)
    for start in range(0, F, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        grad = tl.load(dout + row * F + columns, mask=columns < F, other=0.0).to(tl.float32)
        if RELU2:
            value, by_up = _squared(projected + row * F, start, F, BLOCK)
            dup = (grad * weight * by_up).to(dprojected.dtype.element_ty)
            tl.store(dprojected + columns, dup, mask=columns < F)
        else:
            gate, up = _gate_up(projected + row * 2 * F, start, F, GPT_OSS, BLOCK)
            value, by_gate, by_up = activate(gate, up, GPT_OSS, GELU, ALPHA, LIMIT)
            dgate = (grad * weight * by_gate).to(dprojected.dtype.element_ty)
            dup = (grad * weight * by_up).to(dprojected.dtype.element_ty)
            if GPT_OSS:
                both = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
                pairs = 2 * start + tl.arange(0, 2 * BLOCK)
                tl.store(dprojected + pairs, both, mask=pairs < 2 * F)
            else:
                tl.store(dprojected + columns, dgate, mask=columns < F)
                tl.store(dprojected + F + columns, dup, mask=columns < F)
        dweight += grad * value
    tl.store(dweights + row, tl.sum(dweight, 0))


@triton.jit
def combine_kernel(
    rows, inverse, weights, expert_ids, bias, out,
    D: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of out [M, D], Σ rows[inverse] (+ weight · bias) over X choices of rows [S, D]; grid (M)."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < D
        acc = tl.full((BLOCK,), 0.0, tl.float32)
        for choice in tl.static_range(0, X):  # in one order, which atomic additions by expert would not keep
            row = tl.load(inverse + token * X + choice).to(tl.int64)
            here = mask & (row < tl.num_programs(0) * X)  # experts of other devices have rows past the end
            acc += tl.load(rows + row * D + columns, mask=here, other=0.0).to(tl.float32)
            if bias is not None:
                expert, weight = tl.load(expert_ids + token * X + choice), tl.load(weights + token * X + choice)
                acc += weight * tl.load(bias + expert * D + columns, mask=here, other=0.0).to(tl.float32)
        tl.store(out + token * D + columns, acc.to(out.dtype.element_ty), mask=mask)
