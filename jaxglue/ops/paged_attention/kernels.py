"""Triton kernel of paged attention: Flash-Decoding (Dao et al. 2023) over a table of pages.

A program attends the G query heads of one key/value head over a share of a sequence's pages, and reads only pages with
visible keys. q [S, N, H]; keys and values [pages, K, PAGE, H]; out [S, K, SPLITS, G, H] and lse [S, K, SPLITS, G] in
float32, lse in units of log₂.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-(2.0**100))


@triton.jit
def paged_kernel(
    q, keys, values, tables, positions, out, lse,
    P: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, SCALE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Attend a slot's query heads of one key/value head over a share of its pages."""
    slot, head, split = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    lane, column, token = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H), tl.arange(0, PAGE)
    heads = (lane < G)[:, None] & (column < H)[None, :]
    position = tl.load(positions + slot)
    tile = lane[:, None] * H + column[None, :]
    query = tl.load(q + (slot * K + head) * G * H + tile, mask=heads, other=0.0)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // PAGE
    last = position // PAGE + 1
    share = (last - first + SPLITS - 1) // SPLITS
    begin = first + split * share
    inside = token[:, None] * H + column[None, :]
    highest = tl.full([BLOCK_G], MASKED, tl.float32)
    total = tl.full([BLOCK_G], 0.0, tl.float32)
    acc = tl.full([BLOCK_G, BLOCK_H], 0.0, tl.float32)
    for index in range(begin, tl.minimum(begin + share, last)):
        page = tl.load(tables + slot * P + index).to(tl.int64)
        base = (page * K + head) * (PAGE * H)
        key = tl.load(keys + base + inside, mask=(column < H)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key)) * (SCALE * LOG2_E)
        known = index * PAGE + token
        visible = known <= position
        if WINDOW > 0:
            visible = visible & (known > position - WINDOW)
        scores = tl.where(visible[None, :], scores, MASKED)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, rescale = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total, highest = total * rescale + tl.sum(weights, 1), higher
        value = tl.load(values + base + inside, mask=(column < H)[None, :], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value)

    row = (tl.program_id(0) * SPLITS + split) * G
    some = tl.where(total > 0, total, 1.0)  # a share may have no pages
    tl.store(out + row * H + tile, acc / some[:, None], mask=heads)
    tl.store(lse + row + lane, highest + tl.log2(some), mask=lane < G)
