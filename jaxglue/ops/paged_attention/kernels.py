"""Triton kernels of a paged key/value cache: attention of one query a sequence, and writes of new keys and values.

Attention is Flash-Decoding (Dao et al. 2023) over a table of pages. A program attends the G query heads of one
key/value head, so keys are read once for all of them, over a share of a sequence's pages; it reads only pages with
visible keys. keys and values are [pages, K, PAGE, H]; in float8 they have scales [pages, K, PAGE] in float32.
"""

import triton
import triton.language as tl

from jaxglue.ops.norm_rope.kernels import normed, rms_scale
from jaxglue.ops.quant.fp8_kernels import LARGEST, clip_e4m3, e4m3_scale

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-(2.0**100))
LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def _cap(scores, CAP: tl.constexpr):
    """Return CAP · tanh(scores / CAP); an exponential that overflows gives 1."""
    return CAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / CAP))))


@triton.jit
def _finish(acc, highest, total, sinks, head, lane, G: tl.constexpr):
    """Return the attended values, after the sinks' parts of the denominator, if any."""
    if sinks is not None:
        sink = tl.load(sinks + head * G + lane, mask=lane < G, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(highest, sink)
        rescale = tl.exp2(highest - higher)
        return acc * (rescale / (total * rescale + tl.exp2(sink - higher)))[:, None]
    else:
        return acc / total[:, None]


@triton.jit
def _attend_pages(
    query, keys, values, key_scales, value_scales, table, head, first, last, position, newest, acc, highest, total,
    K: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Attend queries at a position over the pages in [first, last) of a table, up to the token `newest`.

    acc, highest and total are the softmax's before, and are returned after.
    """
    if key_scales is not None:
        query = query.to(tl.float16)  # float8 becomes float16 in one instruction, and bfloat16 in several
    token, column = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_H)
    STEPS: tl.constexpr = PAGE // BLOCK_T
    FACTOR: tl.constexpr = SCALE if CAP > 0 else SCALE * LOG2_E
    for step in range(first * STEPS, last * STEPS):
        row = (tl.load(table + step // STEPS).to(tl.int64) * K + head) * PAGE + step % STEPS * BLOCK_T
        inside = token[:, None] * H + column[None, :]
        known = step * BLOCK_T + token
        visible = known <= newest
        # A mask over columns alone would keep loads of whole rows from being wide.
        loaded = visible[:, None] if BLOCK_H == H else visible[:, None] & (column < H)[None, :]
        key = tl.load(keys + row * H + inside, mask=loaded, other=0.0)
        value = tl.load(values + row * H + inside, mask=loaded, other=0.0)  # 0 · NaN of a page's last owner is NaN
        scores = tl.dot(query, tl.trans(key.to(query.dtype))) * FACTOR
        if key_scales is not None:
            scores *= tl.load(key_scales + row + token, mask=visible, other=0.0)[None, :]
        if CAP > 0:
            scores = _cap(scores, CAP) * LOG2_E
        if WINDOW > 0:
            visible = visible & (known > position - WINDOW)
        scores = tl.where(visible[None, :], scores, MASKED)
        higher = tl.maximum(highest, tl.ceil(tl.max(scores, 1)))  # whole, as in training's kernels
        weights, rescale = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total, highest = total * rescale + tl.sum(weights, 1), higher
        if value_scales is not None:
            # A scale is a head's largest value / 448: times 448, its product with a weight is no tiny float16.
            scale = tl.load(value_scales + row + token, mask=visible, other=0.0) * LARGEST
            weights *= tl.minimum(scale, LARGEST_HALF)[None, :]
        acc = acc * rescale[:, None] + tl.dot(weights.to(query.dtype), value.to(query.dtype))
    return acc, highest, total


@triton.jit
def paged_kernel(
    q, keys, values, key_scales, value_scales, tables, positions, sinks, out, lse,
    P: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Attend a slot's query heads of one key/value head over a share of at least LEAST pages; grid (S · K, SPLITS).

    With one share, out is [S, K, G, H] and lse only a stand-in. With several, out [S, K, SPLITS, G, H] holds each
    share's values in float32 and lse [S, K, SPLITS, G] its log-sum-exp in units of log₂; MASKED for a share without
    pages, which writes no values.
    """
    slot, head, split = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    lane, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
    heads = (lane < G)[:, None] & (column < H)[None, :]
    tile = lane[:, None] * H + column[None, :]
    position = tl.load(positions + slot)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // PAGE
    last = position // PAGE + 1
    if SPLITS > 1:
        share = tl.maximum((last - first + SPLITS - 1) // SPLITS, LEAST)
        first += split * share
        last = tl.minimum(first + share, last)

    query = tl.load(q + (slot * K + head) * G * H + tile, mask=heads, other=0.0)
    highest = tl.full([BLOCK_G], MASKED, tl.float32)
    total = tl.full([BLOCK_G], 0.0, tl.float32)
    acc = tl.full([BLOCK_G, BLOCK_H], 0.0, tl.float32)
    acc, highest, total = _attend_pages(
        query, keys, values, key_scales, value_scales, tables + slot * P, head, first, last, position, position, acc,
        highest, total, K, H, PAGE, WINDOW, SCALE, CAP, BLOCK_H, BLOCK_T,
    )  # fmt: skip

    if value_scales is not None:
        acc /= LARGEST
    if SPLITS == 1:
        acc = _finish(acc, highest, total, sinks, head, lane, G)
        tl.store(out + (slot * K + head) * G * H + tile, acc.to(out.dtype.element_ty), mask=heads)
    else:
        some = first < last
        row = ((slot * K + head) * SPLITS + split) * G
        total = tl.where(some, total, 1.0)
        tl.store(out + row * H + tile, acc / total[:, None], mask=heads & some)
        tl.store(lse + row + lane, highest + tl.log2(total), mask=lane < G)


@triton.jit
def combine_kernel(
    parts, lse, sinks, out,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK_H columns of a query head's shares, weighted by their parts of the softmax's denominator.

    The grid is (S · K, G, ⌈H / BLOCK_H⌉).
    """
    pair, lane = tl.program_id(0), tl.program_id(1)
    split, column = tl.arange(0, BLOCK_S), tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = (pair * SPLITS + split) * G + lane
    size = tl.load(lse + row, mask=split < SPLITS, other=MASKED)
    some = size > MASKED / 2
    highest = tl.max(size, 0)
    if sinks is not None:
        sink = tl.load(sinks + pair % K * G + lane).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    weights = tl.where(some, tl.exp2(size - highest), 0.0)
    total = tl.sum(weights, 0)
    if sinks is not None:
        total += tl.exp2(sink - highest)
    mask = some[:, None] & (column < H)[None, :]
    part = tl.load(parts + row[:, None] * H + column[None, :], mask=mask, other=0.0)
    values = tl.sum(part * weights[:, None], 0) / total
    tl.store(out + (pair * G + lane) * H + column, values.to(out.dtype.element_ty), mask=column < H)


@triton.jit
def _rotated(x, weight, column, mask, c, s, H: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
             ROUNDS_FIRST: tl.constexpr, ROTATES: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Return the halves of heads after their norm, if any, and rotation, rounded to `dtype`."""
    HALF: tl.constexpr = H // 2
    left = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        scale = rms_scale(tl.sum(left * left + right * right, 1), H, EPS)[:, None]
        inside = column < HALF
        own = tl.load(weight + column, mask=inside, other=0.0)[None, :].to(tl.float32)
        left = normed(left, scale, own, dtype, OFFSET, ROUNDS_FIRST)
        own = tl.load(weight + HALF + column, mask=inside, other=0.0)[None, :].to(tl.float32)
        right = normed(right, scale, own, dtype, OFFSET, ROUNDS_FIRST)
    if ROTATES:
        left, right = left * c - right * s, right * c + left * s
    return left.to(dtype), right.to(dtype)


@triton.jit
def _write(left, right, array, scales, row, column, H: tl.constexpr):
    """Write a head's halves [1, H / 2] to the given row of the cache, in float8 times the row's own scale.

    Return them as they are read again, in float32.
    """
    HALF: tl.constexpr = H // 2
    mask = (column < HALF)[None, :]
    scale = 1.0
    if scales is not None:
        left, right = left.to(tl.float32), right.to(tl.float32)
        scale = e4m3_scale(tl.max(tl.maximum(tl.abs(left), tl.abs(right))))
        tl.store(scales + row, scale)
        left, right = clip_e4m3(left / scale), clip_e4m3(right / scale)
    at = array + row * H + column[None, :]
    left, right = left.to(array.dtype.element_ty), right.to(array.dtype.element_ty)
    tl.store(at, left, mask=mask)
    tl.store(at + HALF, right, mask=mask)
    return left.to(tl.float32) * scale, right.to(tl.float32) * scale


@triton.jit
def append_kernel(
    q, k, v, q_weight, k_weight, cos, sin, pages, offsets, key_scales, value_scales, keys, values, q_out, k_out,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, ROTATES: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a token's heads of one key/value head, and write key and value to the cache; grid (T, K)."""
    HALF: tl.constexpr = H // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, column, one = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H), tl.arange(0, 1)
    dtype = q_out.dtype.element_ty
    c, s = 0.0, 0.0
    if ROTATES:
        turns = token * HALF + column
        c = tl.load(cos + turns, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + turns, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    first = (token * K + head) * G * H
    at, mask = first + lane[:, None] * H + column[None, :], (lane < G)[:, None] & (column < HALF)[None, :]
    left, right = _rotated(q + at, q_weight, column, mask, c, s, H, EPS, OFFSET, ROUNDS_FIRST, ROTATES, dtype)
    tl.store(q_out + at, left, mask=mask)
    tl.store(q_out + at + HALF, right, mask=mask)

    at, mask = (token * K + head) * H + one[:, None] + column[None, :], (column < HALF)[None, :]
    left, right = _rotated(k + at, k_weight, column, mask, c, s, H, EPS, OFFSET, ROUNDS_FIRST, ROTATES, dtype)
    tl.store(k_out + at, left, mask=mask)
    tl.store(k_out + at + HALF, right, mask=mask)
    row = (tl.load(pages + token).to(tl.int64) * K + head) * PAGE + tl.load(offsets + token)
    _write(left, right, keys, key_scales, row, column, H)
    left, right = tl.load(v + at, mask=mask, other=0.0), tl.load(v + at + HALF, mask=mask, other=0.0)
    _write(left, right, values, value_scales, row, column, H)


@triton.jit
def _joined(left, right, ROWS: tl.constexpr, H: tl.constexpr):
    """Return whole heads [ROWS, H] of their halves."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, H))


@triton.jit
def append_attend_kernel(
    q, k, v, q_weight, k_weight, cos, sin, pages, offsets, tables, positions, sinks, key_scales, value_scales, keys,
    values, out,
    P: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    ROTATES: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Do as `append_kernel` for the last token of a slot, and attend its heads as `paged_kernel`; grid (S · K).

    The token's own key and value come from registers; H is a power of two.
    """
    HALF: tl.constexpr = H // 2
    slot, head = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    lane, column, one = tl.arange(0, BLOCK_G), tl.arange(0, HALF), tl.arange(0, 1)
    dtype = out.dtype.element_ty
    position = tl.load(positions + slot)
    c, s = 0.0, 0.0
    if ROTATES:
        c = tl.load(cos + slot * HALF + column).to(tl.float32)[None, :]
        s = tl.load(sin + slot * HALF + column).to(tl.float32)[None, :]
    at = (slot * K + head) * H + one[:, None] + column[None, :]
    whole = (column < HALF)[None, :]
    left, right = _rotated(k + at, k_weight, column, whole, c, s, H, EPS, OFFSET, ROUNDS_FIRST, ROTATES, dtype)
    row = (tl.load(pages + slot).to(tl.int64) * K + head) * PAGE + tl.load(offsets + slot)
    key_left, key_right = _write(left, right, keys, key_scales, row, column, H)
    left, right = _write(tl.load(v + at), tl.load(v + at + HALF), values, value_scales, row, column, H)
    value = _joined(left, right, 1, H)

    heads = (slot * K + head) * G * H + lane[:, None] * H
    at, mask = heads + column[None, :], (lane < G)[:, None] & whole
    left, right = _rotated(q + at, q_weight, column, mask, c, s, H, EPS, OFFSET, ROUNDS_FIRST, ROTATES, dtype)
    score = tl.sum(left.to(tl.float32) * key_left + right.to(tl.float32) * key_right, 1)
    score = _cap(score * SCALE, CAP) * LOG2_E if CAP > 0 else score * (SCALE * LOG2_E)
    highest = tl.ceil(score)
    total = tl.exp2(score - highest)
    weight = total.to(dtype).to(tl.float32)
    acc = weight[:, None] * (value * LARGEST if value_scales is not None else value)
    first = tl.maximum(position - WINDOW + 1, 0) // PAGE if WINDOW > 0 else 0
    acc, highest, total = _attend_pages(
        _joined(left, right, BLOCK_G, H), keys, values, key_scales, value_scales, tables + slot * P, head, first,
        (position + PAGE - 1) // PAGE, position, position - 1, acc, highest, total, K, H, PAGE, WINDOW, SCALE, CAP, H,
        BLOCK_T,
    )  # fmt: skip
    if value_scales is not None:
        acc /= LARGEST
    acc = _finish(acc, highest, total, sinks, head, lane, G)
    tl.store(out + heads + tl.arange(0, H)[None, :], acc.to(dtype), mask=(lane < G)[:, None])
