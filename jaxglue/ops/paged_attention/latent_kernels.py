"""Triton kernel of attention over pages of latent vectors, which are the keys and the values of all heads."""

import triton
import triton.language as tl

from jaxglue.ops.paged_attention.kernels import LOG2_E, MASKED


@triton.jit
def latent_kernel(
    q, tokens, tables, positions, out, lse,
    P: tl.constexpr, N: tl.constexpr, TURNING: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_N heads of a slot over a share of at least LEAST pages; grid (S · ⌈N / BLOCK_N⌉, SPLITS).

    q [S, N, TURNING + RANK] and tokens [pages, PAGE, TURNING + RANK] have the turning parts first; a token's others,
    its latent, are read once for scores and values. out and lse are those of `paged_kernel` with one key/value head.
    """
    GROUPS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WIDTH: tl.constexpr = TURNING + RANK
    slot, group, split = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS, tl.program_id(1)
    head = group * BLOCK_N + tl.arange(0, BLOCK_N)
    turning, column, token = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    turns, columns, heads = turning < TURNING, column < RANK, head < N
    position = tl.load(positions + slot)
    first, last = 0, position // PAGE + 1
    if SPLITS > 1:
        share = tl.maximum((last + SPLITS - 1) // SPLITS, LEAST)
        first = split * share
        last = tl.minimum(first + share, last)

    query = q + (slot * N + head)[:, None] * WIDTH
    q_turning = tl.load(query + turning[None, :], mask=heads[:, None] & turns[None, :], other=0.0)
    q_latent = tl.load(query + TURNING + column[None, :], mask=heads[:, None] & columns[None, :], other=0.0)
    highest = tl.full([BLOCK_N], MASKED, tl.float32)
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    acc = tl.full([BLOCK_N, BLOCK_R], 0.0, tl.float32)
    STEPS: tl.constexpr = PAGE // BLOCK_T
    for step in range(first * STEPS, last * STEPS):
        row = tl.load(tables + slot * P + step // STEPS).to(tl.int64) * PAGE + step % STEPS * BLOCK_T
        visible = step * BLOCK_T + token <= position
        inside = tokens + row * WIDTH + token[:, None] * WIDTH
        key = tl.load(inside + turning[None, :], mask=visible[:, None] & turns[None, :], other=0.0)
        latent = tl.load(inside + TURNING + column[None, :], mask=visible[:, None] & columns[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), tl.dot(q_turning, tl.trans(key))) * (SCALE * LOG2_E)
        scores = tl.where(visible[None, :], scores, MASKED)
        higher = tl.maximum(highest, tl.ceil(tl.max(scores, 1)))  # whole, as in training's kernels
        weights, rescale = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total, highest = total * rescale + tl.sum(weights, 1), higher
        acc = tl.dot(weights.to(latent.dtype), latent, acc * rescale[:, None])

    stored = heads[:, None] & columns[None, :]
    if SPLITS == 1:
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (slot * N + head)[:, None] * RANK + column[None, :], result, mask=stored)
    else:
        some = first < last
        row = (slot * SPLITS + split) * N + head
        total = tl.where(some, total, 1.0)
        tl.store(out + row[:, None] * RANK + column[None, :], acc / total[:, None], mask=stored & some)
        tl.store(lse + row, highest + tl.log2(total), mask=heads)
