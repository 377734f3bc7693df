"""Triton kernels of packed attention: forward, gradient of the queries, gradient of the keys and values.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) over packed rows. Two things are particular to packing:

- A program reads the range of its loop with one scalar load from `starts` or `ends`, so tiles outside a segment or a
  window cost nothing, forward and backward. Only tiles that cross a boundary evaluate the mask.
- A tile of queries holds BLOCK_M // G tokens with all G query heads of a key/value head. Short segments and windows
  waste less of a tile, and the gradients of a key sum over the group inside the program: no atomics, so the result
  is deterministic.

Layout: q, out, dout, dq [B, T, K·G, H]; k, v, dk, dv [B, T, K, H]; lse, delta [B, K, T, G] float32, lse in natural
units. A row has fewer than 2³¹ elements per tile; offsets to a tile are 64-bit.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)  # finite: a row that has seen nothing yet is wiped by its first real key, without NaNs


@triton.jit
def _first_visible(starts, tokens, T: tl.constexpr, WINDOW: tl.constexpr):
    """First key that each token sees; T for tokens past the row, as for padding."""
    low = tl.load(starts + tokens, mask=tokens < T, other=T)
    if WINDOW > 0:
        low = tl.maximum(low, tokens - WINDOW + 1)
    return low


@triton.jit
def _load_tile(base, offsets, rows, columns, H: tl.constexpr):
    """A [rows, columns] tile; zeros where `rows` is False and in columns past the head dim."""
    if columns.shape[0] == H:
        return tl.load(base + offsets, mask=rows[:, None], other=0.0)
    return tl.load(base + offsets, mask=rows[:, None] & (columns < H)[None, :], other=0.0)


@triton.jit
def _store_tile(base, offsets, rows, columns, tile, H: tl.constexpr):
    mask = rows[:, None] & (columns < H)[None, :]
    tl.store(base + offsets, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    q, k, v, sinks, starts, out, lse,
    T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries; grid (query tiles, K, B)."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles of a long segment have most to do: first
    TOKENS: tl.constexpr = BLOCK_M // G
    first = tile * TOKENS
    last = tl.minimum(first + TOKENS, T) - 1
    lane, columns, slots = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    tokens = first + lane // G
    valid = (lane < TOKENS * G) & (tokens < T)
    starts += row * T
    low, all_low = _first_visible(starts, first, T, WINDOW), _first_visible(starts, last, T, WINDOW)
    lows = _first_visible(starts, tokens, T, WINDOW)

    q_base = ((row * T + first) * K + head) * G * H
    q_offsets = ((lane // G) * (K * G * H) + (lane % G) * H)[:, None] + columns[None, :]
    q_tile = _load_tile(q + q_base, q_offsets, valid, columns, H)
    kv_offsets = slots[:, None] * (K * H) + columns[None, :]

    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head * G + lane % G).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.full((BLOCK_M, BLOCK_H), 0.0, tl.float32)
    for j in range(low, last + 1, BLOCK_N):
        keys = j + slots
        base = ((row * T + j) * K + head) * H
        k_tile = _load_tile(k + base, kv_offsets, keys < T, columns, H)
        scores = tl.dot(q_tile, tl.trans(k_tile))
        if (j < all_low) | (j + BLOCK_N - 1 > first):
            visible = (keys[None, :] <= tokens[:, None]) & (keys[None, :] >= lows[:, None])
            scores = tl.where(visible, scores, MASKED)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * (SCALE * LOG2_E))
        weights = tl.exp2(scores * (SCALE * LOG2_E) - new_peak[:, None])
        alpha = tl.exp2(peak - new_peak)
        total = total * alpha + tl.sum(weights, 1)
        v_tile = _load_tile(v + base, kv_offsets, keys < T, columns, H)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        peak = new_peak

    seen = lows <= tokens
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    log_sum = tl.where(seen, (peak + tl.log2(tl.where(seen, total, 1.0))) / LOG2_E, 0.0)
    _store_tile(out + q_base, q_offsets, valid, columns, acc, H)
    tl.store(lse + ((row * K + head) * T + first) * G + lane, log_sum, mask=valid)


@triton.jit
def dq_kernel(
    q, k, v, starts, out, lse, dout, dq, delta,
    T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, and delta = Σ out·dout for `dkdv_kernel`; grid (query tiles, K, B)."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    TOKENS: tl.constexpr = BLOCK_M // G
    first = tile * TOKENS
    last = tl.minimum(first + TOKENS, T) - 1
    lane, columns, slots = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    tokens = first + lane // G
    valid = (lane < TOKENS * G) & (tokens < T)
    starts += row * T
    low, all_low = _first_visible(starts, first, T, WINDOW), _first_visible(starts, last, T, WINDOW)
    lows = _first_visible(starts, tokens, T, WINDOW)

    q_base = ((row * T + first) * K + head) * G * H
    q_offsets = ((lane // G) * (K * G * H) + (lane % G) * H)[:, None] + columns[None, :]
    q_tile = _load_tile(q + q_base, q_offsets, valid, columns, H)
    dout_tile = _load_tile(dout + q_base, q_offsets, valid, columns, H)
    out_tile = _load_tile(out + q_base, q_offsets, valid, columns, H)
    stats = ((row * K + head) * T + first) * G + lane
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + stats, row_delta, mask=valid)
    row_lse = tl.load(lse + stats, mask=valid, other=0.0) * LOG2_E
    kv_offsets = slots[:, None] * (K * H) + columns[None, :]

    acc = tl.full((BLOCK_M, BLOCK_H), 0.0, tl.float32)
    for j in range(low, last + 1, BLOCK_N):
        keys = j + slots
        base = ((row * T + j) * K + head) * H
        k_tile = _load_tile(k + base, kv_offsets, keys < T, columns, H)
        v_tile = _load_tile(v + base, kv_offsets, keys < T, columns, H)
        scores = tl.dot(q_tile, tl.trans(k_tile))
        dweights = tl.dot(dout_tile, tl.trans(v_tile))
        if (j < all_low) | (j + BLOCK_N - 1 > first):
            visible = (keys[None, :] <= tokens[:, None]) & (keys[None, :] >= lows[:, None])
            scores = tl.where(visible, scores, MASKED)
        weights = tl.exp2(scores * (SCALE * LOG2_E) - row_lse[:, None])
        dscores = weights * (dweights - row_delta[:, None])
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
    _store_tile(dq + q_base, q_offsets, valid, columns, acc * SCALE, H)


@triton.jit
def dkdv_kernel(
    q, k, v, starts, ends, lse, delta, dout, dk, dv,
    T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, summed over the group of query heads; grid (key tiles, K, B).

    Scores are held transposed, [keys, queries], so that no accumulator has to be.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    TOKENS: tl.constexpr = BLOCK_M // G
    first = tile * BLOCK_N
    last = tl.minimum(first + BLOCK_N, T) - 1
    lane, columns, slots = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    keys = first + slots
    starts += row * T
    ends += row * T
    stop, all_stop = tl.load(ends + last), tl.load(ends + first)
    if WINDOW > 0:
        stop, all_stop = tl.minimum(stop, last + WINDOW), tl.minimum(all_stop, first + WINDOW)

    kv_base = ((row * T + first) * K + head) * H
    kv_offsets = slots[:, None] * (K * H) + columns[None, :]
    k_tile = _load_tile(k + kv_base, kv_offsets, keys < T, columns, H)
    v_tile = _load_tile(v + kv_base, kv_offsets, keys < T, columns, H)
    q_offsets = ((lane // G) * (K * G * H) + (lane % G) * H)[:, None] + columns[None, :]

    dk_acc = tl.full((BLOCK_N, BLOCK_H), 0.0, tl.float32)
    dv_acc = tl.full((BLOCK_N, BLOCK_H), 0.0, tl.float32)
    for i in range(first, stop, TOKENS):
        tokens = i + lane // G
        valid = (lane < TOKENS * G) & (tokens < T)
        base = ((row * T + i) * K + head) * G * H
        stats = ((row * K + head) * T + i) * G + lane
        q_tile = _load_tile(q + base, q_offsets, valid, columns, H)
        dout_tile = _load_tile(dout + base, q_offsets, valid, columns, H)
        row_lse = tl.load(lse + stats, mask=valid, other=0.0) * LOG2_E
        row_delta = tl.load(delta + stats, mask=valid, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile))
        dweights = tl.dot(v_tile, tl.trans(dout_tile))
        if (i < last) | (i + TOKENS > all_stop):
            lows = _first_visible(starts, tokens, T, WINDOW)
            visible = (keys[:, None] <= tokens[None, :]) & (keys[:, None] >= lows[None, :])
            scores = tl.where(visible, scores, MASKED)
        weights = tl.exp2(scores * (SCALE * LOG2_E) - row_lse[None, :])
        dv_acc = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_acc)
        dscores = weights * (dweights - row_delta[None, :])
        dk_acc = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_acc)
    _store_tile(dk + kv_base, kv_offsets, keys < T, columns, dk_acc * SCALE, H)
    _store_tile(dv + kv_base, kv_offsets, keys < T, columns, dv_acc, H)
