"""Triton kernels of projections of up to 256 rows, where multiplying takes as long as reading the weights.

Each program reads all of x, from the L2 cache, so that its rate decides: a program takes up to three times 64 rows of
weights, as many as registers hold sums of. Those of gate and up, with 12,288 columns, are then a program for each
multiprocessor of an H100 or H200, where 64 or 128 rows would leave a third of them idle in the second turn.
"""

import triton
import triton.language as tl

from jaxglue.ops.projection.few_rows_kernels import activate, arrive, load_rows


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
def _store_pairs(
    acc, first, x_scales, gate_scales, up_scales, out, rows, M: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, GELU: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Store activation(gate) · up of sums in the order of `_load_pairs`."""
    dtype: tl.constexpr = out.dtype.element_ty
    if ROUND:
        acc = acc.to(dtype).to(tl.float32)
    pairs = tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    gate, up = tl.reshape(gate, (ROWS // 2, BLOCK_M)), tl.reshape(up, (ROWS // 2, BLOCK_M))
    n = first + tl.arange(0, ROWS // 2)
    if x_scales is not None:
        row_scales = tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        gate *= tl.load(gate_scales + n, mask=n < F, other=0.0)[:, None] * row_scales
        up *= tl.load(up_scales + n, mask=n < F, other=0.0)[:, None] * row_scales
    y = (activate(gate, GELU) * up).to(dtype)
    tl.store(out + rows[None, :] * F + n[:, None], y, mask=(rows < M)[None, :] & (n < F)[:, None])


@triton.jit
def gate_rows_kernel(
    x, x_scales, gate, up, gate_scales, up_scales, out,
    M: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FEW: tl.constexpr, GELU: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute activation(x·gateᵀ) · (x·upᵀ) of BLOCK_N + FEW rows of weights, half of them gate's; grid (F / half).

    x [M, K], M at most BLOCK_M; gate and up [F, K]; out [M, F]. e4m3 values have scales [M] and [F].
    """
    first, rows = tl.program_id(0) * ((BLOCK_N + FEW) // 2), tl.arange(0, BLOCK_M)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    few = tl.full((FEW if FEW > 0 else 16, BLOCK_M), 0.0, tl.float32)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K
        values = tl.trans(load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K))
        acc = tl.dot(_load_pairs(gate, up, first, k, F, K, BLOCK_N, BLOCK_K), values, acc)
        if FEW > 0:
            few = tl.dot(_load_pairs(gate, up, first + BLOCK_N // 2, k, F, K, FEW, BLOCK_K), values, few)
    if FEW > 0:
        _store_pairs(few, first + BLOCK_N // 2, x_scales, gate_scales, up_scales, out, rows, M, F, FEW, BLOCK_M, GELU,
                     ROUND)  # fmt: skip
    _store_pairs(acc, first, x_scales, gate_scales, up_scales, out, rows, M, F, BLOCK_N, BLOCK_M, GELU, ROUND)


@triton.jit
def _load_rows_of(weights, n, k, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, COUNT: tl.constexpr,
                  K: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Load BLOCK_K columns of rows n of COUNT weights, one below the other."""
    n = tl.minimum(n, N_0 + N_1 + N_2 - 1)  # rows beyond are other rows, and not stored
    w = weights[0]
    if COUNT > 1:
        w = tl.where(n < N_0, w, weights[1] - N_0 * K)
    if COUNT > 2:
        w = tl.where(n < N_0 + N_1, w, weights[2] - (N_0 + N_1) * K)
    columns = k + tl.arange(0, BLOCK_K)
    at = (w + n * K)[:, None] + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _store_rows_of(acc, n, rows, x_scales, scales, stream, outs, N: tl.constexpr, FIRST: tl.constexpr,
                   M: tl.constexpr, WHICH: tl.constexpr):  # fmt: skip
    """Scale sums of rows n of all weights, add the stream, and store those of one weight, rounded as training does."""
    dtype: tl.constexpr = outs[WHICH].dtype.element_ty
    own = n - FIRST
    mask = (rows < M)[None, :] & ((own >= 0) & (own < N))[:, None]
    if x_scales is not None:  # products of e4m3 values are rounded before and after their scales
        acc = acc.to(dtype).to(tl.float32) * tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        acc *= tl.load(scales[WHICH] + own, mask=(own >= 0) & (own < N), other=0.0)[:, None]
        acc = acc.to(dtype).to(tl.float32)
    at = rows[None, :] * N + own[:, None]
    if stream is not None:
        acc += tl.load(stream + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(outs[WHICH] + at, acc.to(dtype), mask=mask)


@triton.jit
def _store_all(acc, n, rows, x_scales, scales, stream, outs, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr,
               COUNT: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """Store sums of rows n of COUNT weights, one below the other."""
    _store_rows_of(acc, n, rows, x_scales, scales, stream, outs, N_0, 0, M, 0)
    if COUNT > 1:
        _store_rows_of(acc, n, rows, x_scales, scales, None, outs, N_1, N_0, M, 1)
    if COUNT > 2:
        _store_rows_of(acc, n, rows, x_scales, scales, None, outs, N_2, N_0 + N_1, M, 2)


@triton.jit
def _sum_of_parts(parts, local, rows, SPLITS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the sum of all programs' parts of some rows of a tile, in their order."""
    at = parts + local[:, None] * BLOCK_M + rows[None, :]
    total = tl.load(at, cache_modifier=".cg")
    for other in range(1, SPLITS):
        total += tl.load(at + other * SIZE, cache_modifier=".cg")
    return total


@triton.jit
def many_rows_kernel(
    x, x_scales, weights, scales, stream, counters, parts, outs,
    M: tl.constexpr, K: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, COUNT: tl.constexpr,
    SPLITS: tl.constexpr, STEPS: tl.constexpr, WAIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FEW: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute x·Wᵀ of COUNT weights (+ stream, of one); grid (tiles of BLOCK_N + FEW rows of weights · SPLITS).

    x [M, K], M at most BLOCK_M; weights [N_i, K]; outs [M, N_i]. e4m3 values have scales [M] and [N_i]. Programs of a
    tile sum STEPS steps each, wait for each other with WAIT, and then each adds all parts of some of the rows; without,
    the last one adds all. They have neighboring numbers and so begin together, or when those before them have ended.
    counters: zeros for each tile, before and after.
    """
    program, rows = tl.program_id(0), tl.arange(0, BLOCK_M)
    tile, split = program // SPLITS, program % SPLITS
    first, second = tile * (BLOCK_N + FEW), tile * (BLOCK_N + FEW) + BLOCK_N
    n, n_few = first + tl.arange(0, BLOCK_N), second + tl.arange(0, FEW if FEW > 0 else 16)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    few = tl.full((FEW if FEW > 0 else 16, BLOCK_M), 0.0, tl.float32)
    for index in range(0, STEPS):
        k = (split * STEPS + index) * BLOCK_K
        values = tl.trans(load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K))
        acc = tl.dot(_load_rows_of(weights, n, k, N_0, N_1, N_2, COUNT, K, BLOCK_K), values, acc)
        if FEW > 0:
            few = tl.dot(_load_rows_of(weights, n_few, k, N_0, N_1, N_2, COUNT, K, BLOCK_K), values, few)
    if SPLITS == 1:
        _store_all(acc, n, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M)
        if FEW > 0:
            _store_all(few, n_few, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M)
        return

    SIZE: tl.constexpr = (BLOCK_N + FEW) * BLOCK_M
    parts += tile.to(tl.int64) * SPLITS * SIZE
    own = parts + split * SIZE
    tl.store(own + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + rows[None, :], acc)
    if FEW > 0:
        tl.store(own + (BLOCK_N + tl.arange(0, FEW))[:, None] * BLOCK_M + rows[None, :], few)
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
    for part in range(begin, end):
        local = part * (BLOCK_N // SPLITS) + tl.arange(0, BLOCK_N // SPLITS)
        total = _sum_of_parts(parts, local, rows, SPLITS, SIZE, BLOCK_M)
        _store_all(total, first + local, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M)
        if FEW > 0:
            local = BLOCK_N + part * (FEW // SPLITS) + tl.arange(0, FEW // SPLITS)
            total = _sum_of_parts(parts, local, rows, SPLITS, SIZE, BLOCK_M)
            _store_all(total, first + local, rows, x_scales, scales, stream, outs, N_0, N_1, N_2, COUNT, M)
