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
PAIRS_ASSEMBLY = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
"""Splits two words, of tokens side by side, in the lower bytes and the higher ones, and makes float16 of each pair."""


@triton.jit
def _cap(scores, CAP: tl.constexpr):
    """Return CAP · tanh(scores / CAP); an exponential that overflows gives 1."""
    return CAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / CAP))))


@triton.jit
def _finish(first, second, highest, total, sinks, head, lane, G: tl.constexpr):
    """Return both halves of the attended values, after the sinks' parts of the denominator, if any."""
    if sinks is not None:
        sink = tl.load(sinks + head * G + lane, mask=lane < G, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(highest, sink)
        rescale = tl.exp2(highest - higher)
        factor = (rescale / (total * rescale + tl.exp2(sink - higher)))[None, :]
        return first * factor, second * factor
    else:
        return first / total[None, :], second / total[None, :]


@triton.jit
def _values_of_pairs(pairs, PLAIN: tl.constexpr):
    """Return the float16 values of the lower and of the higher bytes of words that hold two e4m3 values."""
    if PLAIN:  # for the interpreter, which knows no instructions
        low, high = pairs & 255, (pairs >> 8) & 255
        low, high = low.to(tl.uint8).to(tl.float8e4nv, bitcast=True), high.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            PAIRS_ASSEMBLY, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _joined(first, second, PAIRS: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr):
    """Return whole heads [ROWS, H] of their halves: left and right ones or, as PAIRS, even and odd columns."""
    both = tl.join(first, second)
    return tl.reshape(both if PAIRS else tl.permute(both, (0, 2, 1)), (ROWS, H))


@triton.jit
def _attend_pages(
    query, keys, values, key_scales, value_scales, table, page, head, begin, end, position, newest, first, second,
    highest, total,
    K: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr, PLAIN: tl.constexpr,
    ROWS: tl.constexpr = 1, G: tl.constexpr = 1,
):  # fmt: skip
    """Attend queries [BLOCK_G, BLOCK_H] at a position over the pages in [begin, end), up to the token `newest`.

    page is the table's entry at `begin`, if there are pages. With several ROWS, G queries each are at the position, the
    next one, … .

    Warps attend BLOCK_T tokens each of a step, apart from each other: a step has no sums over several warps, and its
    products, keys by queries and values by weights, are as wide as there are queries, not the 16 of tensor cores'
    other side. first and second [WARPS, BLOCK_H / 2, BLOCK_G], halves of the weighted values, and the softmax's highest
    and total [WARPS, BLOCK_G] are those before; those of all warps are returned, without that axis.

    Values in float8 are read as words of two neighboring columns: transposed bytes would be read one by one.
    """
    if key_scales is not None:
        query = query.to(tl.float16)  # float8 becomes float16 in one instruction, and bfloat16 in several
    HALF: tl.constexpr = H // 2
    column, half = tl.arange(0, BLOCK_H)[None, None, :], tl.arange(0, BLOCK_H // 2)[None, :, None]
    token = tl.arange(0, WARPS)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    # The sum of one array hides where queries come from: Triton would read keys in narrow words after a `tl.join`.
    query = tl.broadcast_to(tl.trans(tl.sum(query[None, :, :], 0))[None, :, :], (WARPS, BLOCK_H, BLOCK_G))
    STEPS: tl.constexpr = PAGE // (BLOCK_T * WARPS)
    FACTOR: tl.constexpr = SCALE if CAP > 0 else SCALE * LOG2_E
    for step in range(begin * STEPS, end * STEPS):
        row = (page.to(tl.int64) * K + head) * PAGE + step % STEPS * (BLOCK_T * WARPS)
        # Known a step ahead, pages are loaded as far ahead as there are stages.
        page = tl.load(table + tl.minimum((step + 1) // STEPS, end - 1))
        positions = step * (BLOCK_T * WARPS) + token
        visible = positions <= newest
        at = keys + row * H + (token[:, :, None] * H + column)
        # A mask over columns alone would keep loads of whole rows from being wide.
        key = tl.load(at) if BLOCK_H == H else tl.load(at, mask=column < H, other=0.0)
        loaded = visible[:, None, :] if BLOCK_H == H else visible[:, None, :] & (half < HALF)
        # 0 · NaN of a page's last owner is NaN.
        if value_scales is not None:
            at = values.to(tl.pointer_type(tl.int16)) + row * HALF + (token[:, None, :] * HALF + half)
            left, right = _values_of_pairs(tl.load(at, mask=loaded, other=0), PLAIN)
        else:
            at = values + row * H + (token[:, None, :] * H + half)
            left = tl.load(at, mask=loaded, other=0.0).to(query.dtype)
            right = tl.load(at + HALF, mask=loaded, other=0.0).to(query.dtype)
        scores = tl.dot(key.to(query.dtype), query)
        if key_scales is not None:
            scores *= (tl.load(key_scales + row + token) * FACTOR)[:, :, None]
        else:
            scores *= FACTOR
        if CAP > 0:
            scores = _cap(scores, CAP) * LOG2_E
        if ROWS > 1:
            own = (position + tl.arange(0, BLOCK_G) // G)[None, None, :]
            seen = positions[:, :, None] <= own
            if WINDOW > 0:
                seen = seen & (positions[:, :, None] > own - WINDOW)
            scores = tl.where(seen & visible[:, :, None], scores, MASKED)
        else:
            if WINDOW > 0:
                visible = visible & (positions > position - WINDOW)
            scores = tl.where(visible[:, :, None], scores, MASKED)
        higher = tl.maximum(highest, tl.ceil(tl.max(scores, 1)))  # whole, as in training's kernels
        weights, rescale = tl.exp2(scores - higher[:, None, :]), tl.exp2(highest - higher)
        total, highest = total * rescale + tl.sum(weights, 1), higher
        if value_scales is not None:
            # A scale is a head's largest value / 448: times 448, its product with a weight is no tiny float16.
            scale = tl.load(value_scales + row + token, mask=positions <= newest, other=0.0) * LARGEST
            weights *= tl.minimum(scale, LARGEST_HALF)[:, :, None]
        weights, rescale = weights.to(query.dtype), rescale[:, None, :]
        first = first * rescale + tl.dot(left, weights)
        second = second * rescale + tl.dot(right, weights)
    # A warp without visible tokens has MASKED as its highest, and no part of the sums.
    top = tl.max(highest, 0)
    rescale = tl.exp2(highest - top[None, :])
    total, rescale = tl.sum(total * rescale, 0), rescale[:, None, :]
    first, second = tl.sum(first * rescale, 0), tl.sum(second * rescale, 0)
    if value_scales is not None:
        first, second = first * (1 / LARGEST), second * (1 / LARGEST)
    return first, second, top, total


@triton.jit
def paged_kernel(
    q, keys, values, key_scales, value_scales, tables, positions, sinks, out, lse,
    P: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr, PLAIN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attend a slot's query heads of one key/value head over a share of at least LEAST pages; grid (S · K, SPLITS).

    A slot has queries of ROWS tokens, the first of which is at its position. With one share, out is [S, ROWS, K, G, H]
    and lse only a stand-in. With several, out [S, ROWS, K, SPLITS, G, H] holds each share's values in float32 and lse
    [S, ROWS, K, SPLITS, G] its log-sum-exp in units of log₂; MASKED for a share without pages that a query sees.
    """
    slot, head, split = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    lane, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
    used = lane < ROWS * G
    heads = used[:, None] & (column < H)[None, :]
    position = tl.load(positions + slot)
    newest = position
    if ROWS > 1:
        newest = tl.minimum(position + ROWS - 1, P * PAGE - 1)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // PAGE
    end = newest // PAGE + 1
    if SPLITS > 1:
        share = tl.maximum((end - begin + SPLITS - 1) // SPLITS, LEAST)
        begin += split * share
        end = tl.minimum(begin + share, end)
    page = tl.load(tables + slot * P + begin, mask=begin < end, other=0)

    group = (slot * ROWS + lane // G) * K + head  # of a token's heads; `lane % G` is a head of them
    query = tl.load(q + (group * G + lane % G)[:, None] * H + column[None, :], mask=heads, other=0.0)
    highest = tl.full([WARPS, BLOCK_G], MASKED, tl.float32)
    total = tl.full([WARPS, BLOCK_G], 0.0, tl.float32)
    nothing = tl.full([WARPS, BLOCK_H // 2, BLOCK_G], 0.0, tl.float32)
    first, second, highest, total = _attend_pages(
        query=query, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales,
        table=tables + slot * P, page=page, head=head, begin=begin, end=end, position=position, newest=newest,
        first=nothing, second=nothing, highest=highest, total=total, K=K, H=H, PAGE=PAGE, WINDOW=WINDOW, SCALE=SCALE,
        CAP=CAP, BLOCK_G=BLOCK_G, BLOCK_H=BLOCK_H, BLOCK_T=BLOCK_T, WARPS=WARPS, PLAIN=PLAIN, ROWS=ROWS, G=G,
    )  # fmt: skip

    PAIRS: tl.constexpr = value_scales is not None
    if not PAIRS:
        half = column % (BLOCK_H // 2)
        heads = used[:, None] & (half < H // 2)[None, :]
        column = column // (BLOCK_H // 2) * (H // 2) + half
    if SPLITS == 1:
        first, second = _finish(first, second, highest, total, sinks, head, lane % G, G)
        values = _joined(tl.trans(first), tl.trans(second), PAIRS, BLOCK_G, BLOCK_H)
        at = (group * G + lane % G)[:, None] * H + column[None, :]
        tl.store(out + at, values.to(out.dtype.element_ty), mask=heads)
    else:
        some = begin < end
        row = (group * SPLITS + split) * G + lane % G
        total = tl.where(some, total, 1.0)
        values = _joined(tl.trans(first), tl.trans(second), PAIRS, BLOCK_G, BLOCK_H)
        tl.store(out + row[:, None] * H + column[None, :], values / total[:, None], mask=heads & some)
        tl.store(lse + row, highest + tl.log2(total), mask=used)


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
def _halves(x, mask, HALF: tl.constexpr):
    """Load the halves of heads."""
    return tl.load(x, mask=mask, other=0.0), tl.load(x + HALF, mask=mask, other=0.0)


@triton.jit
def _norm_halves(weight, column, HALF: tl.constexpr):
    """Load the halves of a norm's weight [1, HALF]; zeros without one."""
    if weight is not None:
        left, right = _halves(weight + column, column < HALF, HALF)
        return left[None, :].to(tl.float32), right[None, :].to(tl.float32)
    else:
        return 0.0, 0.0


@triton.jit
def _rotated(left, right, weight, own_left, own_right, c, s, H: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
             ROUNDS_FIRST: tl.constexpr, ROTATES: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Return the halves of heads after their norm, if there is a weight, and rotation, rounded to `dtype`.

    own_left and own_right are the weight's halves.
    """
    left, right = left.to(tl.float32), right.to(tl.float32)
    if weight is not None:
        scale = rms_scale(tl.sum(left * left + right * right, 1), H, EPS)[:, None]
        left = normed(left, scale, own_left, dtype, OFFSET, ROUNDS_FIRST)
        right = normed(right, scale, own_right, dtype, OFFSET, ROUNDS_FIRST)
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
    left, right = _halves(q + at, mask, HALF)
    own_left, own_right = _norm_halves(q_weight, column, HALF)
    left, right = _rotated(
        left=left, right=right, weight=q_weight, own_left=own_left, own_right=own_right, c=c, s=s, H=H, EPS=EPS,
        OFFSET=OFFSET, ROUNDS_FIRST=ROUNDS_FIRST, ROTATES=ROTATES, dtype=dtype,
    )  # fmt: skip
    tl.store(q_out + at, left, mask=mask)
    tl.store(q_out + at + HALF, right, mask=mask)

    at, mask = (token * K + head) * H + one[:, None] + column[None, :], (column < HALF)[None, :]
    left, right = _halves(k + at, mask, HALF)
    own_left, own_right = _norm_halves(k_weight, column, HALF)
    left, right = _rotated(
        left=left, right=right, weight=k_weight, own_left=own_left, own_right=own_right, c=c, s=s, H=H, EPS=EPS,
        OFFSET=OFFSET, ROUNDS_FIRST=ROUNDS_FIRST, ROTATES=ROTATES, dtype=dtype,
    )  # fmt: skip
    tl.store(k_out + at, left, mask=mask)
    tl.store(k_out + at + HALF, right, mask=mask)
    row = (tl.load(pages + token).to(tl.int64) * K + head) * PAGE + tl.load(offsets + token)
    _write(left, right, keys, key_scales, row, column, H)
    left, right = tl.load(v + at, mask=mask, other=0.0), tl.load(v + at + HALF, mask=mask, other=0.0)
    _write(left, right, values, value_scales, row, column, H)


@triton.jit
def append_attend_kernel(
    q, k, v, q_weight, k_weight, cos, sin, pages, offsets, tables, positions, sinks, key_scales, value_scales, keys,
    values, out,
    P: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    ROTATES: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr, PLAIN: tl.constexpr,
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
    inside = (column < HALF)[None, :]
    heads = (slot * K + head) * G * H + lane[:, None] * H
    # All is loaded before the first norm: no load passes the barriers of a sum.
    k_left, k_right = _halves(k + at, inside, HALF)
    v_left, v_right = _halves(v + at, inside, HALF)
    q_left, q_right = _halves(q + heads + column[None, :], (lane < G)[:, None] & inside, HALF)
    k_own_left, k_own_right = _norm_halves(k_weight, column, HALF)
    q_own_left, q_own_right = _norm_halves(q_weight, column, HALF)
    row = (tl.load(pages + slot).to(tl.int64) * K + head) * PAGE + tl.load(offsets + slot)
    begin = tl.maximum(position - WINDOW + 1, 0) // PAGE if WINDOW > 0 else 0
    end = (position + PAGE - 1) // PAGE
    page = tl.load(tables + slot * P + begin, mask=begin < end, other=0)
    left, right = _rotated(
        left=k_left, right=k_right, weight=k_weight, own_left=k_own_left, own_right=k_own_right, c=c, s=s, H=H,
        EPS=EPS, OFFSET=OFFSET, ROUNDS_FIRST=ROUNDS_FIRST, ROTATES=ROTATES, dtype=dtype,
    )  # fmt: skip
    key_left, key_right = _write(left, right, keys, key_scales, row, column, H)
    left, right = _write(v_left, v_right, values, value_scales, row, column, H)
    PAIRS: tl.constexpr = value_scales is not None
    if PAIRS:
        left, right = tl.split(tl.reshape(_joined(left, right, False, 1, H), (1, HALF, 2)))
        left, right = left * LARGEST, right * LARGEST

    q_left, q_right = _rotated(
        left=q_left, right=q_right, weight=q_weight, own_left=q_own_left, own_right=q_own_right, c=c, s=s, H=H,
        EPS=EPS, OFFSET=OFFSET, ROUNDS_FIRST=ROUNDS_FIRST, ROTATES=ROTATES, dtype=dtype,
    )  # fmt: skip
    score = tl.sum(q_left.to(tl.float32) * key_left + q_right.to(tl.float32) * key_right, 1)
    score = _cap(score * SCALE, CAP) * LOG2_E if CAP > 0 else score * (SCALE * LOG2_E)
    first_warp = tl.arange(0, WARPS)[:, None] == 0  # the first warp attends the new token
    highest = tl.where(first_warp, tl.ceil(score)[None, :], MASKED)
    total = tl.where(first_warp, tl.exp2(score[None, :] - highest), 0.0)
    weight = total.to(dtype).to(tl.float32)[:, None, :]
    first, second, highest, total = _attend_pages(
        query=_joined(q_left, q_right, False, BLOCK_G, H), keys=keys, values=values, key_scales=key_scales,
        value_scales=value_scales, table=tables + slot * P, page=page, head=head, begin=begin, end=end,
        position=position, newest=position - 1, first=weight * left[:, :, None], second=weight * right[:, :, None],
        highest=highest, total=total, K=K, H=H, PAGE=PAGE, WINDOW=WINDOW, SCALE=SCALE, CAP=CAP, BLOCK_G=BLOCK_G,
        BLOCK_H=H, BLOCK_T=BLOCK_T, WARPS=WARPS, PLAIN=PLAIN,
    )  # fmt: skip
    first, second = _finish(first, second, highest, total, sinks, head, lane, G)
    values = _joined(tl.trans(first), tl.trans(second), PAIRS, BLOCK_G, H)
    tl.store(out + heads + tl.arange(0, H)[None, :], values.to(dtype), mask=(lane < G)[:, None])
