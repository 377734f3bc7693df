"""Triton kernels of attention over pages in the order of training's tiles, whose bits it has, and of writes to them.

Attention is `attention.kernels.forward_kernel` of one token: the same tiles of keys, products, peaks and sums, by the
same functions. Its lines beyond a group's heads are empty, which costs tensor cores that would else wait for memory.
"""

import triton
import triton.language as tl

from jaxglue.ops.attention.kernels import MASKED, begin_sums, capped, weigh
from jaxglue.ops.norm_rope.kernels import rotate


@triton.jit
def _load_tokens(pool, rows, inside, H: tl.constexpr, WIDTH: tl.constexpr):
    """Load the heads [tokens, WIDTH] in these rows of a pool [pages · K · PAGE, H]; zeros for tokens not inside."""
    column = tl.arange(0, WIDTH)
    mask = inside[:, None]
    if WIDTH > H:
        mask = mask & (column < H)[None, :]
    return tl.load(pool + rows[:, None] * H + column[None, :], mask=mask, other=0.0)


@triton.jit
def rotate_append_kernel(
    q, k, v, q_weight, k_weight, cos, sin, pages, offsets, keys, values, q_out,
    N: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a token's heads as `rotate_kernel`, and write its keys and values to the cache; grid (T).

    q and q_out are [T, N·H], k and v [T, K·H], keys and values [pages, K, PAGE, H].
    """
    H: tl.constexpr = spec.H
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (spec.turning // 2), sin + token * (spec.turning // 2)
    to = (tl.load(pages + token).to(tl.int64) * K * PAGE + tl.load(offsets + token)) * H
    rotate(q + token * N * H, q_weight, cos, sin, q_out + token * N * H, N, False, BLOCK_N, H, spec)
    rotate(k + token * K * H, k_weight, cos, sin, keys + to, K, False, BLOCK_K, PAGE * H, spec)
    heads, columns = tl.arange(0, BLOCK_K), tl.arange(0, WIDTH)
    for start in tl.static_range(0, K, BLOCK_K):
        mask = (start + heads < K)[:, None] & (columns < H)[None, :]
        head = (start + heads)[:, None]
        own = tl.load(v + token * K * H + head * H + columns[None, :], mask=mask, other=0.0)
        tl.store(values + to + head * (PAGE * H) + columns[None, :], own.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _pages_of(table, tile, before, shared, end, PAGE: tl.constexpr, spec: tl.constexpr):
    """Return the first token of a tile, and the pages of this one and of the tile's last."""
    first = tl.where(tile < before, tile * spec.block_n, shared + (tile - before) * spec.block_n)
    last = tl.minimum(first + spec.block_n, end) - 1
    return first, tl.load(table + tl.minimum(first, last) // PAGE), tl.load(table + last // PAGE)


@triton.jit
def tiled_kernel(
    q, keys, values, tables, positions, forks, sinks, out,
    TABLE: tl.constexpr, PAGE: tl.constexpr, AHEAD: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Attend the G query heads of a slot's key/value head; grid (S · K).

    q and out are [S, K, G, H], keys and values [pages, K, PAGE, H], tables [S, TABLE]. Tiles begin at multiples of
    block_n tokens, and of those from `forks` [S] on. With a window, a token sees so many, itself included.

    AHEAD, where tiles are in two pages at most, these are looked up a tile before: else a tile's keys would be loaded
    no earlier than its pages, and waited for.
    """
    slot, head = tl.program_id(0) // spec.K, tl.program_id(0) % spec.K
    lane, slots, column = tl.arange(0, spec.block_m), tl.arange(0, spec.block_n), tl.arange(0, spec.width)
    end, fork = tl.load(positions + slot) + 1, tl.load(forks + slot)
    heads = (tl.program_id(0).to(tl.int64) * spec.G + lane[:, None]) * spec.H + column[None, :]
    mask = (lane < spec.G)[:, None] & (column < spec.H)[None, :]
    q_tile = tl.load(q + heads, mask=mask, other=0.0)
    peak, total = begin_sums(sinks, head * spec.G + lane % spec.G, spec.has_sinks, spec.block_m)
    acc = tl.full((spec.block_m, spec.width), 0.0, tl.float32)
    shared = tl.minimum(fork, end)  # tokens before the fork that are there
    before, first, low = tl.cdiv(shared, spec.block_n), 0, 0
    if spec.window > 0:  # tiles that the token does not see would change no bit
        low = tl.maximum(end - spec.window, 0)
        first = tl.where(low < shared, low // spec.block_n, before + (low - shared) // spec.block_n)
    table = tables + slot * TABLE
    if AHEAD:
        start, page, last_page = _pages_of(table, first, before, shared, end, PAGE, spec)
    for tile in range(first, before + tl.cdiv(end - shared, spec.block_n)):
        own = tile >= before
        tokens = tl.where(own, shared + (tile - before) * spec.block_n, tile * spec.block_n) + slots
        inside = tokens < tl.where(own, end, shared)
        if spec.window > 0:
            inside &= tokens >= low
        if AHEAD:
            pages = tl.where(tokens // PAGE == start // PAGE, page, last_page)
            start, page, last_page = _pages_of(table, tile + 1, before, shared, end, PAGE, spec)
        else:
            pages = tl.load(table + tokens // PAGE, mask=inside, other=0)
        rows = (pages.to(tl.int64) * spec.K + head) * PAGE + tokens % PAGE
        k_tile = _load_tokens(keys, rows, inside, spec.H, spec.width)
        scores = capped(tl.dot(q_tile, tl.trans(k_tile)), spec)
        scores = tl.where(inside[None, :], scores, MASKED)
        weights, alpha, peak, total = weigh(scores, peak, total, spec)
        v_tile = _load_tokens(values, rows, inside, spec.H, spec.width)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    tl.store(out + heads, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
