"""Triton kernel of products whose sums run in one order, whatever the rows of x and the tiles.

A tile's sum takes 16 columns after another, those of an instruction of the tensor cores, in float32, and no other
program has a part of it: a row has the same bits among few rows as among many, and those of cuBLAS' product of 16,384
rows. Rows of x are divided among programs where those of weights would leave multiprocessors idle.
"""

import triton
import triton.language as tl


@triton.jit
def _load(matrix, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of some rows of a matrix with K columns; neighboring programs read them again."""
    columns = k + tl.arange(0, BLOCK_K)
    at = matrix + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _add_steps(acc, x, w, rows, n, first, last, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add w·xᵀ of some rows to acc, from a step of BLOCK_K columns to before another, 16 columns after another."""
    for step in range(first, last):
        values = _load(x, rows, step * BLOCK_K, K, BLOCK_K)
        acc = tl.dot(_load(w, n, step * BLOCK_K, K, BLOCK_K), tl.trans(values), acc, input_precision="ieee")
    return acc


@triton.jit
def ordered_kernel(
    x, weights, outs,
    M: tl.constexpr, K: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, N_3: tl.constexpr,
    COUNT: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute x·Wᵀ of COUNT weights [N_i, K], each in tiles of its own; x [M, K], outs [M, N_i].

    With PART, sums of the last weight are of so many columns, and then added one after another.

    Grid (tiles of all weights · M / BLOCK_M): programs that run together have the same weights, and of many rows at
    most GROUP blocks, which the L2 cache holds.
    """
    TILES_0: tl.constexpr = (N_0 + BLOCK_N - 1) // BLOCK_N
    TILES_1: tl.constexpr = (N_1 + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = (N_2 + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = TILES_0 + TILES_1 + TILES_2 + (N_3 + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    group = program // (GROUP * TILES) * GROUP
    size = tl.minimum(BLOCKS - group, GROUP)
    tile, block = program % (GROUP * TILES) // size, group + program % (GROUP * TILES) % size
    w, out, first, N = weights[0], outs[0], 0, N_0
    for i in tl.static_range(1, COUNT):
        before = TILES_0 if i == 1 else TILES_0 + TILES_1 if i == 2 else TILES_0 + TILES_1 + TILES_2
        if tile >= before:
            w, out, first, N = weights[i], outs[i], before, N_1 if i == 1 else N_2 if i == 2 else N_3
    n, rows = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N), block * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows beyond a matrix are other rows, whose products are not stored.
    n_inside, rows_inside = tl.minimum(n, N - 1), tl.minimum(rows, M - 1)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if PART is None:
        acc = _add_steps(acc, x, w, rows_inside, n_inside, 0, STEPS, K, BLOCK_K)
    else:
        LAST: tl.constexpr = 0 if COUNT == 1 else TILES_0 if COUNT == 2 else TILES_0 + TILES_1 + (COUNT == 4) * TILES_2
        length = tl.where(tile >= LAST, PART // BLOCK_K, STEPS)
        for step in range(0, STEPS, length):
            own = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
            own = _add_steps(own, x, w, rows_inside, n_inside, step, tl.minimum(step + length, STEPS), K, BLOCK_K)
            acc = tl.where(step == 0, own, acc + own)
    at = rows.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(rows < M)[None, :] & (n < N)[:, None])
