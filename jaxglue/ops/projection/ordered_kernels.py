"""Triton kernel of products whose sums run in one order, whatever the rows of x and the tiles.

A tile's sum takes 16 columns after another, those of an instruction of the tensor cores, in float32, and no other
program has a part of it: a row has the same bits among few rows as among many, and those of cuBLAS' product of 16,384
rows. Rows of x are divided among programs where those of weights would leave multiprocessors idle.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@triton.jit
def load_columns(matrix, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of some rows of a matrix with K columns; neighboring programs read them again."""
    columns = k + tl.arange(0, BLOCK_K)
    at = matrix + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def add_steps(acc, x, w, rows, n, first, last, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add w·xᵀ of some rows to acc, from a step of BLOCK_K columns to before another, 16 columns after another."""
    for step in range(first, last):
        values = load_columns(x, rows, step * BLOCK_K, K, BLOCK_K)
        acc = tl.dot(load_columns(w, n, step * BLOCK_K, K, BLOCK_K), tl.trans(values), acc, input_precision="ieee")
    return acc


@dataclass(frozen=True, kw_only=True)
class OrderedSpec:
    """Constants of `ordered_kernel`; tuples have a value for each weight."""

    M: int
    K: int
    widths: tuple[int, ...]
    """Rows of the weight."""
    firsts: tuple[int, ...]
    """Its first tile."""
    tiles: int
    """Of all weights."""
    outs: tuple[int, ...]
    """Number of the output that has its products."""
    columns: tuple[int, ...]
    """First of them there."""
    strides: tuple[int, ...]
    """Columns of that output."""
    part: int | None
    block_m: int
    block_n: int
    block_k: int
    group: int


@triton.jit
def ordered_kernel(x, weights, outs, spec: tl.constexpr):
    """Compute x·Wᵀ of several weights [N_i, K], each in tiles of its own; x [M, K], outs [M, strides_i].

    With a part, sums of the last weight are of so many columns, and then added one after another.

    Grid (tiles of all weights · M / block_m): programs that run together have the same weights, and of many rows at
    most `group` blocks, which the L2 cache holds.
    """
    K: tl.constexpr = spec.K
    COUNT: tl.constexpr = len(spec.widths)
    BLOCKS: tl.constexpr = (spec.M + spec.block_m - 1) // spec.block_m
    STEPS: tl.constexpr = (K + spec.block_k - 1) // spec.block_k
    program = tl.program_id(0)
    group = program // (spec.group * spec.tiles) * spec.group
    size = tl.minimum(BLOCKS - group, spec.group)
    tile = program % (spec.group * spec.tiles) // size
    block = group + program % (spec.group * spec.tiles) % size
    w, out, first, N, stride = weights[0], outs[0], 0, spec.widths[0], spec.strides[0]
    for i in tl.static_range(1, COUNT):
        if tile >= spec.firsts[i]:
            w, out = weights[i], outs[spec.outs[i]] + spec.columns[i]
            first, N, stride = spec.firsts[i], spec.widths[i], spec.strides[i]
    n, rows = (
        (tile - first) * spec.block_n + tl.arange(0, spec.block_n),
        block * spec.block_m + tl.arange(0, spec.block_m),
    )
    # Rows beyond a matrix are other rows, whose products are not stored.
    n_inside, rows_inside = tl.minimum(n, N - 1), tl.minimum(rows, spec.M - 1)
    acc = tl.full((spec.block_n, spec.block_m), 0.0, tl.float32)
    if spec.part is None:
        acc = add_steps(acc, x, w, rows_inside, n_inside, 0, STEPS, K, spec.block_k)
    else:
        length = tl.where(tile >= spec.firsts[COUNT - 1], spec.part // spec.block_k, STEPS)
        for step in range(0, STEPS, length):
            last = tl.minimum(step + length, STEPS)
            own = tl.full((spec.block_n, spec.block_m), 0.0, tl.float32)
            own = add_steps(own, x, w, rows_inside, n_inside, step, last, K, spec.block_k)
            acc = tl.where(step == 0, own, acc + own)
    at = rows.to(tl.int64)[None, :] * stride + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(rows < spec.M)[None, :] & (n < N)[:, None])
