"""Triton kernels of projections of some hundred rows, where multiplying takes as long as reading the weights.

Each program reads 256 rows of x, from the L2 cache, so that its rate decides: a program takes up to three times 64 rows
of weights, as many as registers hold sums of. Those of gate and up, with 12,288 columns, are then a program for each
multiprocessor of an H100 or H200, where 64 or 128 rows would leave a third of them idle in the second turn.
"""

import triton
import triton.language as tl

from jaxglue.ops.projection.few_rows_kernels import activate, arrive, as_e4m3, load_rows


@triton.jit
def _load_pairs(gate, up, first, k, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of ROWS / 2 rows of gate and of up, from `first` on: eight of the one, then of the other.

    So a thread's sums, of rows 8 apart, are of gate and up of one column.
    """
    rows = tl.arange(0, ROWS)
    own = tl.minimum(first + rows // 16 * 8 + rows % 8, F - 1)  # rows beyond are other rows, and not stored
    columns = k + tl.arange(0, BLOCK_K)
    at = tl.where((rows % 16 < 8)[:, None], gate, up) + own[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _add_adapters(
    acc, low_rank, gate_b, up_b, factors, first, rows, M: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    R: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add the products of low_rank [M, 2R], gate's ranks and then up's, with second matrices [F, R]."""
    lanes, ranks = tl.arange(0, ROWS), tl.arange(0, BLOCK_R)
    own = tl.minimum(first + lanes // 16 * 8 + lanes % 8, F - 1)
    is_gate, of_gate = lanes % 16 < 8, ranks < R
    rank = tl.where(of_gate, ranks, ranks - R)
    matching = (is_gate[:, None] == of_gate[None, :]) & (ranks < 2 * R)[None, :]
    at = tl.where(is_gate, gate_b, up_b)[:, None] + own[:, None] * R + rank[None, :]
    b = tl.load(at, mask=matching, other=0.0) * tl.where(is_gate, tl.load(factors), tl.load(factors + 1))[:, None]
    inside = (rows < M)[:, None] & (ranks < 2 * R)[None, :]
    low = tl.load(low_rank + rows[:, None] * (2 * R) + ranks[None, :], mask=inside, other=0.0)
    return tl.dot(b.to(low.dtype), tl.trans(low), acc)


@triton.jit
def _store_pairs(
    acc, first, x_scales, gate_scales, up_scales, low_rank, gate_b, up_b, factors, out, rows, M: tl.constexpr,
    F: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    GELU: tl.constexpr, ROUND: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Store activation(gate) · up of sums in the order of `_load_pairs`."""
    dtype: tl.constexpr = out.dtype.element_ty
    if E4M3 > 0:
        acc = as_e4m3(acc, E4M3)
    elif ROUND:
        acc = acc.to(dtype).to(tl.float32)
    if x_scales is not None:
        lanes = tl.arange(0, ROWS)
        own, is_gate = first + lanes // 16 * 8 + lanes % 8, lanes % 16 < 8
        acc *= tl.load(tl.where(is_gate, gate_scales, up_scales) + own, mask=own < F, other=0.0)[:, None]
        acc *= tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
    if R > 0:
        acc = _add_adapters(acc, low_rank, gate_b, up_b, factors, first, rows, M, F, ROWS, R, BLOCK_R)
    pairs = tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    gate, up = tl.reshape(gate, (ROWS // 2, BLOCK_M)), tl.reshape(up, (ROWS // 2, BLOCK_M))
    n = first + tl.arange(0, ROWS // 2)
    y = (activate(gate, GELU) * up).to(dtype)
    tl.store(out + rows[None, :] * F + n[:, None], y, mask=(rows < M)[None, :] & (n < F)[:, None])


@triton.jit
def gate_rows_kernel(
    x, x_scales, gate, up, gate_scales, up_scales, low_rank, gate_b, up_b, factors, out,
    M: tl.constexpr, K: tl.constexpr, F: tl.constexpr, R: tl.constexpr, FEW: tl.constexpr, GELU: tl.constexpr,
    ROUND: tl.constexpr, E4M3: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute activation(x·gateᵀ) · (x·upᵀ) of BLOCK_N + FEW rows of weights, half of them gate's.

    x [M, K]; gate and up [F, K]; out [M, F]. e4m3 values have scales [M] and [F]. Grid (F / half · M / BLOCK_M):
    programs of the same weights are neighbors. Adapters have low_rank [M, 2R], second matrices [F, R] and factors.
    Products are rounded before adapters: e4m3 values' to e4m3 after multiplication by E4M3, if this is not 0.
    """
    BLOCKS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    first, rows = program // BLOCKS * ((BLOCK_N + FEW) // 2), program % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    few = tl.full((FEW if FEW > 0 else 16, BLOCK_M), 0.0, tl.float32)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K
        values = tl.trans(load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K))
        acc = tl.dot(_load_pairs(gate, up, first, k, F, K, BLOCK_N, BLOCK_K), values, acc)
        if FEW > 0:
            few = tl.dot(_load_pairs(gate, up, first + BLOCK_N // 2, k, F, K, FEW, BLOCK_K), values, few)
    if FEW > 0:
        _store_pairs(few, first + BLOCK_N // 2, x_scales, gate_scales, up_scales, low_rank, gate_b, up_b, factors, out,
                     rows, M, F, R, BLOCK_R, FEW, BLOCK_M, GELU, ROUND, E4M3)  # fmt: skip
    _store_pairs(acc, first, x_scales, gate_scales, up_scales, low_rank, gate_b, up_b, factors, out, rows, M, F, R,
                 BLOCK_R, BLOCK_N, BLOCK_M, GELU, ROUND, E4M3)  # fmt: skip


@triton.jit
def _of(first, values, N_0: tl.constexpr, N_1: tl.constexpr, COUNT: tl.constexpr):
    """Return the value of the weight that has row `first` of COUNT, one below the other."""
    found = values[0]
    if COUNT > 1:
        found = tl.where(first < N_0, found, values[1])
    if COUNT > 2:
        found = tl.where(first < N_0 + N_1, found, values[2])
    return found


@triton.jit
def _load_block(weights, first, k, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, COUNT: tl.constexpr,
                K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Load BLOCK_K columns of ROWS rows of the weight that has row `first`."""
    n = first - _of(first, (0, N_0, N_0 + N_1), N_0, N_1, COUNT) + tl.arange(0, ROWS)
    if (N_0 + N_1 + N_2) % ROWS != 0:
        n = tl.minimum(n, _of(first, (N_0, N_1, N_2), N_0, N_1, COUNT) - 1)  # other rows, which are not stored
    columns = k + tl.arange(0, BLOCK_K)
    at = _of(first, weights, N_0, N_1, COUNT) + n[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _store_block(
    acc, first, rows, x_scales, scales, stream, outs, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr,
    COUNT: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scale sums of ROWS rows of the weight that has row `first`, add the stream, and store them.

    Products of e4m3 values are rounded before and after their scales, as training does.
    """
    dtype: tl.constexpr = outs[0].dtype.element_ty
    n = first - _of(first, (0, N_0, N_0 + N_1), N_0, N_1, COUNT) + tl.arange(0, ROWS)
    N = _of(first, (N_0, N_1, N_2), N_0, N_1, COUNT)
    mask = (rows < M)[None, :] & (n < N)[:, None]
    if x_scales is not None:
        acc = acc.to(dtype).to(tl.float32) * tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        acc *= tl.load(_of(first, scales, N_0, N_1, COUNT) + n, mask=n < N, other=0.0)[:, None]
        acc = acc.to(dtype).to(tl.float32)
    at = rows[None, :] * N + n[:, None]
    if stream is not None:
        acc += tl.load(stream + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(_of(first, outs, N_0, N_1, COUNT) + at, acc.to(dtype), mask=mask)


@triton.jit
def _sum_of_parts(parts, local, lanes, SPLITS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the sum of all programs' parts of some rows of a tile, in their order."""
    at = parts + local[:, None] * BLOCK_M + lanes[None, :]
    total = tl.load(at, cache_modifier=".cg")
    for other in range(1, SPLITS):
        total += tl.load(at + other * SIZE, cache_modifier=".cg")
    return total


@triton.jit
def many_rows_kernel(
    x, x_scales, weights, scales, stream, counters, parts, outs,
    M: tl.constexpr, K: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, COUNT: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, WAIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FEW: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute x·Wᵀ of COUNT weights (+ stream, of one); grid (TILES · blocks of x's rows · SPLITS).

    x [M, K]; weights [N_i, K]; outs [M, N_i]. A tile has BLOCK_N of the first TILES · BLOCK_N rows of the weights, one
    below the other, and FEW of the last, in neither case of two weights: of q, k and v the former are q's. e4m3 values
    have scales [M] and [N_i]. Programs of a tile sum STEPS steps each, wait for each other with WAIT, and then each
    adds all parts of some of the rows; without, the last one adds all. They have neighboring numbers and so begin
    together, or when those before them have ended.
    counters: zeros for each tile, before and after.
    """
    BLOCKS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK_M)
    tile, split = program // SPLITS, program % SPLITS
    first, rows = tile // BLOCKS * BLOCK_N, tile % BLOCKS * BLOCK_M + lanes
    second = TILES * BLOCK_N + tile // BLOCKS * FEW
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    few = tl.full((FEW if FEW > 0 else 16, BLOCK_M), 0.0, tl.float32)
    for index in range(0, STEPS):
        k = (split * STEPS + index) * BLOCK_K
        values = tl.trans(load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K))
        acc = tl.dot(_load_block(weights, first, k, N_0, N_1, N_2, COUNT, K, BLOCK_N, BLOCK_K), values, acc)
        if FEW > 0:
            few = tl.dot(_load_block(weights, second, k, N_0, N_1, N_2, COUNT, K, FEW, BLOCK_K), values, few)
    if SPLITS == 1:
        _store_block(acc, first, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M, BLOCK_N)
        if FEW > 0:
            _store_block(few, second, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M, FEW)
        return

    SIZE: tl.constexpr = (BLOCK_N + FEW) * BLOCK_M
    parts += tile.to(tl.int64) * SPLITS * SIZE
    own = parts + split * SIZE
    tl.store(own + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + lanes[None, :], acc)
    if FEW > 0:
        tl.store(own + (BLOCK_N + tl.arange(0, FEW))[:, None] * BLOCK_M + lanes[None, :], few)
    begin, end = 0, SPLITS
    count = arrive(counters + tile)
    if WAIT:
        while count < SPLITS:
            count = tl.atomic_add(counters + tile, 0, sem="acquire")
        if arrive(counters + tile) == 2 * SPLITS - 1:
            tl.store(counters + tile, 0)
        begin, end = split, split + 1
    else:
        if count < SPLITS - 1:
            return
        tl.store(counters + tile, 0)
    EACH: tl.constexpr = BLOCK_N // SPLITS
    EACH_FEW: tl.constexpr = FEW // SPLITS
    for part in range(begin, end):
        total = _sum_of_parts(parts, part * EACH + tl.arange(0, EACH), lanes, SPLITS, SIZE, BLOCK_M)
        at = first + part * EACH
        _store_block(total, at, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M, EACH)
        if FEW > 0:
            total = _sum_of_parts(
                parts, BLOCK_N + part * EACH_FEW + tl.arange(0, EACH_FEW), lanes, SPLITS, SIZE, BLOCK_M
            )
            at = second + part * EACH_FEW
            _store_block(total, at, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M, EACH_FEW)
