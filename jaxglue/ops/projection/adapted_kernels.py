"""Triton kernel of products in one order with their adapters, and the activation or the stream, in one launch.

Sums are those of `ordered_kernel`, and what is added to them has the places and the order of `sums_kernel` and of
`swiglu_kernel`, whose bits these are. The first programs multiply x by the adapters' first matrices; the others wait
for these at the end, as in `few_rows_kernel`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jaxglue.ops.gated_mlp.kernels import activate
from jaxglue.ops.projection.few_rows_kernels import BEYOND, arrive, await_low_ranks
from jaxglue.ops.projection.ordered_kernels import add_steps, load_columns


@dataclass(frozen=True, kw_only=True)
class AdaptedSpec:
    """Constants of `adapted_kernel`; tuples have a value for each weight."""

    M: int
    K: int
    R: int
    """Ranks of each adapter."""
    widths: tuple[int, ...]
    """Rows of each weight."""
    firsts: tuple[int, ...]
    """First tile of each weight; gate and up share theirs."""
    tiles: int
    """Tiles of all weights."""
    factors: tuple[float, ...]
    """Factor of each adapter's second matrix."""
    part: int | None
    """Columns of a part of the adapters' sums, which are then added one after another; None for whole sums."""
    activation: str | None
    """Activation of the gate, where the weights are gate and up."""
    block_m: int
    block_n: int
    block_k: int
    block_r: int
    precision: str


@triton.jit
def _shrink(x, down, used, parts, low_rank, counter, unread, added, part, rows, spec: tl.constexpr):
    """Multiply a part of some rows of x by a first matrix [R, K]; the last program adds the parts in their order.

    It writes low_rank [block_r, block_m] and adds `added` to `unread`. With used [M, R], other ranks are zeros.
    """
    PARTS: tl.constexpr = 1 if spec.part is None else (spec.K + spec.part - 1) // spec.part
    STEPS: tl.constexpr = (spec.K + spec.block_k - 1) // spec.block_k
    LENGTH: tl.constexpr = STEPS if spec.part is None else spec.part // spec.block_k
    SIZE: tl.constexpr = spec.block_n * spec.block_m
    lanes = tl.arange(0, spec.block_n)
    # Other lines of the instructions' 64 are the last rank's once more.
    ranks, inside = tl.minimum(lanes, spec.R - 1), tl.minimum(rows, spec.M - 1)
    acc = tl.full((spec.block_n, spec.block_m), 0.0, tl.float32)
    end = tl.minimum((part + 1) * LENGTH, STEPS)
    acc = add_steps(acc, x, down, inside, ranks, part * LENGTH, end, spec.K, spec.block_k)
    at = lanes[:, None] * spec.block_m + tl.arange(0, spec.block_m)[None, :]
    if PARTS > 1:
        tl.store(parts + part * SIZE + at, acc)
        if arrive(counter) == PARTS - 1:
            acc = tl.load(parts + at, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                acc += tl.load(parts + other * SIZE + at, cache_modifier=".cg")
            tl.store(counter, 0)
            _store_ranks(acc, used, low_rank, unread, added, rows, spec)
    else:
        _store_ranks(acc, used, low_rank, unread, added, rows, spec)


@triton.jit
def _store_ranks(acc, used, low_rank, unread, added, rows, spec: tl.constexpr):
    """Write an adapter's ranks [block_n, block_m] to low_rank [block_r, block_m], and tell of them."""
    lanes = tl.arange(0, spec.block_n)
    kept = (lanes < spec.R)[:, None] & (rows < spec.M)[None, :]
    if used is not None:
        kept = kept & (tl.load(used + rows[None, :] * spec.R + lanes[:, None], mask=kept, other=0) != 0)
    at = lanes[:, None] * spec.block_m + tl.arange(0, spec.block_m)[None, :]
    acc = tl.where(kept, acc, 0.0).to(low_rank.dtype.element_ty)
    tl.store(low_rank + at, acc, mask=(lanes < spec.block_r)[:, None])
    tl.debug_barrier()  # one thread signals that all have stored
    tl.atomic_add(unread, added, sem="release")


@triton.jit
def _second(matrix, rows, FACTOR: tl.constexpr, dtype: tl.constexpr, spec: tl.constexpr):
    """Load rows of an adapter's second matrix [N, R], times its factor."""
    ranks = tl.arange(0, spec.block_r)
    values = tl.load(matrix + rows[:, None] * spec.R + ranks[None, :], mask=(ranks < spec.R)[None, :], other=0.0)
    return (values * FACTOR).to(dtype)


@triton.jit
def _low_rank(low_ranks, adapter: tl.constexpr, spec: tl.constexpr):
    """Load an adapter's [block_r, block_m], which another program of this launch has written."""
    at = tl.arange(0, spec.block_r)[:, None] * spec.block_m + tl.arange(0, spec.block_m)[None, :]
    return tl.load(low_ranks + adapter * spec.block_r * spec.block_m + at, cache_modifier=".cg")


@triton.jit
def _rounded(acc, dtype: tl.constexpr):
    return acc.to(dtype).to(tl.float32)


@triton.jit
def adapted_kernel(x, weights, downs, matrices, used, stream, counters, parts, low_ranks, outs, spec: tl.constexpr):
    """Compute x·Wᵢᵀ + (x·Aᵢᵀ)·(factorᵢ · Bᵢ)ᵀ (+ stream), or activation(gate)·up of two such sums.

    x [M, K], weights [N_i, K], downs [R, K] in x's dtype, matrices [N_i, R] in float32, outs [M, N_i]. For each adapter
    and block of rows, parts have [block_n, block_m] of each part, and low_ranks [block_r, block_m]. counters: of each
    block, a count for each adapter's parts, and one for readers of all low ranks; zeros before and after. Grid
    ((parts of all adapters + tiles of all weights) · M / block_m): programs that run together have the same weights.
    """
    COUNT: tl.constexpr = len(spec.widths)
    BLOCKS: tl.constexpr = (spec.M + spec.block_m - 1) // spec.block_m
    PARTS: tl.constexpr = 1 if spec.part is None else (spec.K + spec.part - 1) // spec.part
    STEPS: tl.constexpr = (spec.K + spec.block_k - 1) // spec.block_k
    SIZE: tl.constexpr = spec.block_r * spec.block_m
    dtype: tl.constexpr = outs[0].dtype.element_ty
    block, number = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    rows = block * spec.block_m + tl.arange(0, spec.block_m)
    low_ranks, counters = low_ranks + block * COUNT * SIZE, counters + block * (COUNT + 1)
    if number < COUNT * PARTS:
        adapter, down = number // PARTS, downs[0]
        for i in tl.static_range(1, COUNT):
            if adapter == i:
                down = downs[i]
        # The tiles that have yet to read the ranks once all adapters are there, and beyond them before.
        added = tl.where(adapter == 0, spec.tiles - (COUNT - 1) * BEYOND, BEYOND)
        of_adapter = parts + (block * COUNT + adapter) * PARTS * spec.block_n * spec.block_m
        _shrink(
            x=x, down=down, used=used, parts=of_adapter, low_rank=low_ranks + adapter * SIZE,
            counter=counters + adapter, unread=counters + COUNT, added=added, part=number % PARTS, rows=rows, spec=spec,
        )  # fmt: skip
        return
    tile, inside = number - COUNT * PARTS, tl.minimum(rows, spec.M - 1)
    if spec.activation is not None:
        N: tl.constexpr = spec.widths[0]
        n = tile * spec.block_n + tl.arange(0, spec.block_n)
        lines = tl.minimum(n, N - 1)  # those beyond a weight are others, whose products are not stored
        second, up_second = (
            _second(matrices[0], lines, spec.factors[0], dtype, spec),
            _second(matrices[1], lines, spec.factors[1], dtype, spec),
        )
        gate = tl.full((spec.block_n, spec.block_m), 0.0, tl.float32)
        up = gate
        for step in range(0, STEPS):
            values = tl.trans(load_columns(x, inside, step * spec.block_k, spec.K, spec.block_k))
            own = load_columns(weights[0], lines, step * spec.block_k, spec.K, spec.block_k)
            gate = tl.dot(own, values, gate, input_precision="ieee")
            own = load_columns(weights[1], lines, step * spec.block_k, spec.K, spec.block_k)
            up = tl.dot(own, values, up, input_precision="ieee")
        await_low_ranks(counters + COUNT, spec.tiles)
        gate, up = _rounded(gate, dtype), _rounded(up, dtype)
        gate = tl.dot(second, _low_rank(low_ranks, 0, spec), gate, input_precision=spec.precision)
        up = tl.dot(up_second, _low_rank(low_ranks, 1, spec), up, input_precision=spec.precision)
        y = (activate(gate, spec.activation)[0] * up).to(dtype)
        at = rows.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(outs[0] + at, y, mask=(rows < spec.M)[None, :] & (n < N)[:, None])
    else:
        for i in tl.static_range(COUNT):
            own_tile = tile - spec.firsts[i]
            if (own_tile >= 0) & (own_tile * spec.block_n < spec.widths[i]):
                _sum(x, weights[i], matrices[i], i, stream, low_ranks, counters + COUNT, outs[i], own_tile, rows, spec)


@triton.jit
def _sum(x, weight, matrix, WHICH: tl.constexpr, stream, low_ranks, unread, out, tile, rows, spec: tl.constexpr):
    """Compute a tile of one weight's products with its adapter's (+ stream)."""
    N: tl.constexpr = spec.widths[WHICH]
    dtype: tl.constexpr = out.dtype.element_ty
    STEPS: tl.constexpr = (spec.K + spec.block_k - 1) // spec.block_k
    n, inside = tile * spec.block_n + tl.arange(0, spec.block_n), tl.minimum(rows, spec.M - 1)
    lines = tl.minimum(n, N - 1)
    second = _second(matrix, lines, spec.factors[WHICH], dtype, spec)
    acc = tl.full((spec.block_n, spec.block_m), 0.0, tl.float32)
    acc = add_steps(acc, x, weight, inside, lines, 0, STEPS, spec.K, spec.block_k)
    product = acc.to(dtype)
    at, mask = rows.to(tl.int64)[None, :] * N + n[:, None], (rows < spec.M)[None, :] & (n < N)[:, None]
    EARLY: tl.constexpr = spec.block_m * spec.block_n <= 128 * 128  # larger tiles leave no registers for it
    if EARLY and stream is not None:
        added = tl.load(stream + at, mask=mask, other=0.0)
    await_low_ranks(unread, spec.tiles)
    total = tl.dot(second, _low_rank(low_ranks, WHICH, spec), input_precision=spec.precision)
    if stream is None:
        total = _rounded(total, dtype)
    total += product.to(tl.float32)
    if stream is not None:  # unrounded: an adapter's product alone is often below a stream's last bit
        if not EARLY:
            added = tl.load(stream + at, mask=mask, other=0.0)
        total += added.to(tl.float32)
    tl.store(out + at, total.to(dtype), mask=mask)
