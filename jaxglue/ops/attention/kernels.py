"""Triton kernels of packed attention: forward, gradient of the queries, gradient of the keys and values.

FlashAttention-2 (Dao 2023, arXiv 2307.08691) over packed rows. Three choices are specific to packing:

- A program reads the range of its loop with one scalar load from `starts` or `ends`, so tiles outside a segment or
  window cost nothing. Only tiles that cross a boundary evaluate the mask.
- With FORKS, `starts` is [B, 3, T]: beside it lie the bounds of the keys that a query skips, those of the other
  continuation of a forked segment. A tile whose queries all skip a range jumps over it. With a WINDOW too, `ends` is
  [B, 2, T], with positions in segments, by which windows go.
- A tile of queries holds P of the G query heads of a key/value head for BLOCK_M // P tokens. Short segments and windows
  waste less of a tile, and a key's gradient is summed over the group inside one program: without atomics,
  deterministically.

Layout: q, out, dout, dq [B, T, N, H]; k, dk [B, T, K, H]; v, dv are the last K heads of [B, T, V, H]; lse, delta
[B, N // P, T, P] float32, lse in natural units. Offsets of tiles are 64-bit, offsets in a tile 32-bit. With DESCRIPTORS
(compute capability ≥ 9.0), matmul operands come through TMA, which needs no registers for addresses.

The heads of a tile run consecutively, and the tiles with least to do run last. With a UNIT of tokens, tiles are parts
of the UNITS in `PackedSegments.units`, and a program without a tile returns at once.

With LATE, a loop's last matmul runs one tile late, while the next tile's exponentials are computed (FlashAttention-3,
Shah et al. 2024, arXiv 2407.08608). The sums and their order stay the same.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite: a row's sums before its first visible key are wiped without NaNs when that key comes. A power of two: scaling
# it is exact, where a fused multiply-add could leave a rounding error of 1e22 as exponent.
MASKED = tl.constexpr(-(2.0**100))


@triton.jit
def _unit_tile(units, rank, TOKENS: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Return (first token, end) of a tile of a unit; a token not before the end if there is none."""
    SHARE: tl.constexpr = UNIT // TOKENS
    unit, part = units + rank // SHARE, rank % SHARE
    begin, end = tl.load(unit), tl.load(unit + UNITS)
    first = begin + (SHARE - 1 - part if LAST_FIRST else part) * TOKENS
    return first, tl.minimum(first + TOKENS, end)


@triton.jit
def query_tile(
    units, T: tl.constexpr, PACKS: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr
):
    """Return (row, first token, end, pack of heads) of a program; it has no tile if the token is not before the end.

    Late tiles of a document have most work and come first.
    """
    row = tl.program_id(1).to(tl.int64)
    rank, pack = tl.program_id(0) // PACKS, tl.program_id(0) % PACKS
    if UNIT > 0:
        first, end = _unit_tile(units + row * 4 * UNITS, rank, TOKENS, UNIT, UNITS, True)
    else:
        first = (tl.num_programs(0) // PACKS - 1 - rank) * TOKENS
        end = tl.minimum(first + TOKENS, T)
    return row, first, end, pack


@triton.jit
def key_tile(units, T: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr):
    """Do as `query_tile` for keys of a head; early tiles of a document have most work and come first."""
    row = tl.program_id(1).to(tl.int64)
    rank, head = tl.program_id(0) // K, tl.program_id(0) % K
    if UNIT > 0:
        first, end = _unit_tile(units + (row * 4 + 2) * UNITS, rank, BLOCK_N, UNIT, UNITS, False)
    else:
        first = rank * BLOCK_N
        end = tl.minimum(first + BLOCK_N, T)
    return row, first, end, head


@triton.jit
def _gaps(starts, tokens, T: tl.constexpr):
    """Return the keys [from, to) that each token skips; padding and tokens past the row skip all."""
    gap_start = tl.load(starts + T + tokens, mask=tokens < T, other=0)
    return gap_start, tl.load(starts + 2 * T + tokens, mask=tokens < T, other=T)


@triton.jit
def _first_visible(starts, tokens, T: tl.constexpr, WINDOW: tl.constexpr, FORKS: tl.constexpr):
    """Return the first visible key of each token; T for padding and tokens past the row."""
    low = tl.load(starts + tokens, mask=tokens < T, other=T)
    if WINDOW > 0:
        bound = tokens - WINDOW + 1
        if FORKS:  # skipped keys do not count
            gap_start, gap_end = _gaps(starts, tokens, T)
            bound = tl.where((gap_end > gap_start) & (bound < gap_end), bound - (gap_end - gap_start), bound)
        low = tl.maximum(low, bound)
    return low


@triton.jit
def _jump(gap_starts, gap_ends, low, stop, BLOCK_N: tl.constexpr):
    """Return (loop's end, where it jumps, by how much, first key of the range skipped by all) of a tile of queries."""
    begin, end = tl.max(gap_starts, 0), -tl.max(-gap_ends, 0)
    begin, end = tl.where(end > begin, begin, stop), tl.where(end > begin, end, stop)
    end = tl.maximum(end, low)  # a window may begin after the range
    bend = low + tl.cdiv(tl.maximum(begin - low, 0), BLOCK_N) * BLOCK_N
    return bend + tl.maximum(stop - end, 0), bend, end - bend, begin


@triton.jit
def tile_of(row, token, end, head, T: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
          PACK: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Return (base, offsets, mask) of the tile [TOKENS·PACK, BLOCK_H] of tokens before `end` of [B, T, HEADS, H]."""
    lane, column = tl.arange(0, TOKENS * PACK), tl.arange(0, BLOCK_H)
    base = ((row * T + token) * HEADS + head) * H
    offsets = ((lane // PACK) * (HEADS * H) + (lane % PACK) * H)[:, None] + column[None, :]
    mask = (token + lane // PACK < end)[:, None]
    if H < BLOCK_H:
        mask = mask & (column < H)[None, :]
    return base, offsets, mask


@triton.jit
def _load(source, row, token, head, T: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
          PACK: tl.constexpr, BLOCK_H: tl.constexpr, DESCRIPTOR: tl.constexpr):  # fmt: skip
    """Load a tile, by pointer or descriptor; zeros past the head dim, zeros or another row's tokens past the row."""
    if DESCRIPTOR:
        return source.load([(row * T + token).to(tl.int32), head, 0]).reshape(TOKENS * PACK, BLOCK_H)
    else:
        base, offsets, mask = tile_of(row, token, T, head, T, HEADS, H, TOKENS, PACK, BLOCK_H)
        return tl.load(source + base + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(target, value, row, token, end, head, T: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr,
           TOKENS: tl.constexpr, PACK: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Store a tile's tokens before `end`."""
    base, offsets, mask = tile_of(row, token, end, head, T, HEADS, H, TOKENS, PACK, BLOCK_H)
    tl.store(target + base + offsets, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _last_tile(low, stop, BLOCK_N: tl.constexpr):
    """Return the first key of the last of the tiles from `low` to `stop`; `low` if there are none."""
    return low + tl.maximum(tl.cdiv(stop - low, BLOCK_N) - 1, 0) * BLOCK_N


@triton.jit
def forward_kernel(
    q, k, v, sinks, starts, units, out, lse,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, WINDOW: tl.constexpr, FORKS: tl.constexpr, SCALE: tl.constexpr,
    HAS_SINKS: tl.constexpr, DESCRIPTORS: tl.constexpr, Q_DESCRIPTOR: tl.constexpr, LATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of one tile of queries; grid (query tiles · N // P, B)."""
    N: tl.constexpr = K * G
    TOKENS: tl.constexpr = BLOCK_M // P
    row, first, end, pack = query_tile(units, T, N // P, TOKENS, UNIT, UNITS)
    if first >= end:
        return
    head, kv_head = pack * P, pack * P // G
    last = end - 1
    lane, slots = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    tokens = first + lane // P
    starts += row * (3 * T if FORKS else T)
    low = _first_visible(starts, first, T, WINDOW, FORKS)
    all_low = _first_visible(starts, last, T, WINDOW, FORKS)
    lows = _first_visible(starts, tokens, T, WINDOW, FORKS)
    if FORKS and WINDOW > 0:  # a second continuation begins further back than a first one ends
        low, all_low = -tl.max(-lows, 0), tl.max(lows, 0)
    q_tile = _load(q, row, first, head, T, N, H, TOKENS, P, BLOCK_H, Q_DESCRIPTOR)

    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head + lane % P).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.full((BLOCK_M, BLOCK_H), 0.0, tl.float32)
    stop = last + 1
    if FORKS:
        gap_starts, gap_ends = _gaps(starts, tokens, T)
        any_start, any_end = -tl.max(-tl.where(gap_ends > gap_starts, gap_starts, T), 0), tl.max(gap_ends, 0)
        stop, bend, shift, skipped = _jump(gap_starts, gap_ends, low, stop, BLOCK_N)
    weights, alpha = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), tl.full((BLOCK_M,), 1.0, tl.float32)
    for i in range(low, stop, BLOCK_N):
        j, before = i, tl.maximum(i - BLOCK_N, low)
        if FORKS:
            j, before = tl.where(i < bend, i, i + shift), tl.where(before < bend, before, before + shift)
        k_tile = _load(k, row, j, kv_head, T, K, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
        scores = tl.dot(q_tile, tl.trans(k_tile))
        if LATE:
            v_tile = _load(v, row, before, V - K + kv_head, T, V, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        cut = (j < all_low) | (j + BLOCK_N - 1 > first)
        if FORKS:
            cut = cut | ((j < any_end) & (j + BLOCK_N > any_start))
        if cut:
            keys = j + slots
            visible = (keys[None, :] <= tokens[:, None]) & (keys[None, :] >= lows[:, None])
            if FORKS:
                visible &= (keys[None, :] < gap_starts[:, None]) | (keys[None, :] >= gap_ends[:, None])
                visible &= (keys[None, :] < skipped) | (i >= bend)
            scores = tl.where(visible, scores, MASKED)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * (SCALE * LOG2_E))
        weights = tl.exp2(scores * (SCALE * LOG2_E) - new_peak[:, None])
        alpha = tl.exp2(peak - new_peak)
        total = total * alpha + tl.sum(weights, 1)
        if not LATE:
            v_tile = _load(v, row, j, V - K + kv_head, T, V, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        peak = new_peak
    if LATE:
        j = _last_tile(low, stop, BLOCK_N)
        if FORKS:
            j = tl.where(j < bend, j, j + shift)
        v_tile = _load(v, row, j, V - K + kv_head, T, V, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * alpha[:, None])

    seen = (lows <= tokens) & (tokens < T)
    total = tl.where(seen, total, 1.0)
    acc = tl.where(seen[:, None], acc / total[:, None], 0.0)
    store_tile(out, acc, row, first, end, head, T, N, H, TOKENS, P, BLOCK_H)
    log_sum = tl.where(seen, (peak + tl.log2(total)) / LOG2_E, 0.0)
    tl.store(lse + ((row * (N // P) + pack) * T + first) * P + lane, log_sum, mask=tokens < end)


@triton.jit
def query_gradient(
    q, k, v, starts, out, lse, dout, delta, row, first, end, pack,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    WINDOW: tl.constexpr, FORKS: tl.constexpr, SCALE: tl.constexpr, DESCRIPTORS: tl.constexpr,
    Q_DESCRIPTOR: tl.constexpr, LATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Store delta = Σ out·dout of one tile, and return its dq."""
    N: tl.constexpr = K * G
    TOKENS: tl.constexpr = BLOCK_M // P
    head, kv_head = pack * P, pack * P // G
    last = end - 1
    lane, slots = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    tokens = first + lane // P
    starts += row * (3 * T if FORKS else T)
    low = _first_visible(starts, first, T, WINDOW, FORKS)
    all_low = _first_visible(starts, last, T, WINDOW, FORKS)
    lows = _first_visible(starts, tokens, T, WINDOW, FORKS)
    if FORKS and WINDOW > 0:  # a second continuation begins further back than a first one ends
        low, all_low = -tl.max(-lows, 0), tl.max(lows, 0)
    dout_tile = _load(dout, row, first, head, T, N, H, TOKENS, P, BLOCK_H, False)
    out_tile = _load(out, row, first, head, T, N, H, TOKENS, P, BLOCK_H, False)
    # Loaded last, as a load by descriptor waits. It lands in registers, of which dout would take too many.
    q_tile = _load(q, row, first, head, T, N, H, TOKENS, P, BLOCK_H, Q_DESCRIPTOR)
    stats = ((row * (N // P) + pack) * T + first) * P + lane
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + stats, row_delta, mask=tokens < end)
    row_lse = tl.load(lse + stats, mask=tokens < T, other=0.0) * LOG2_E

    acc = tl.full((BLOCK_M, BLOCK_H), 0.0, tl.float32)
    stop = last + 1
    if FORKS:
        gap_starts, gap_ends = _gaps(starts, tokens, T)
        any_start, any_end = -tl.max(-tl.where(gap_ends > gap_starts, gap_starts, T), 0), tl.max(gap_ends, 0)
        stop, bend, shift, skipped = _jump(gap_starts, gap_ends, low, stop, BLOCK_N)
    dscores = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for i in range(low, stop, BLOCK_N):
        j, before = i, tl.maximum(i - BLOCK_N, low)
        if FORKS:
            j, before = tl.where(i < bend, i, i + shift), tl.where(before < bend, before, before + shift)
        k_tile = _load(k, row, j, kv_head, T, K, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
        v_tile = _load(v, row, j, V - K + kv_head, T, V, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
        scores = tl.dot(q_tile, tl.trans(k_tile))
        dweights = tl.dot(dout_tile, tl.trans(v_tile))
        if LATE:
            before_tile = _load(k, row, before, kv_head, T, K, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
            acc = tl.dot(dscores.to(k_tile.dtype), before_tile, acc)
        cut = (j < all_low) | (j + BLOCK_N - 1 > first)
        if FORKS:
            cut = cut | ((j < any_end) & (j + BLOCK_N > any_start))
        if cut:
            keys = j + slots
            visible = (keys[None, :] <= tokens[:, None]) & (keys[None, :] >= lows[:, None])
            if FORKS:
                visible &= (keys[None, :] < gap_starts[:, None]) | (keys[None, :] >= gap_ends[:, None])
                visible &= (keys[None, :] < skipped) | (i >= bend)
            scores = tl.where(visible, scores, MASKED)
        weights = tl.exp2(scores * (SCALE * LOG2_E) - row_lse[:, None])
        dscores = weights * (dweights - row_delta[:, None])
        if not LATE:
            acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
    if LATE:
        j = _last_tile(low, stop, BLOCK_N)
        if FORKS:
            j = tl.where(j < bend, j, j + shift)
        k_tile = _load(k, row, j, kv_head, T, K, H, BLOCK_N, 1, BLOCK_H, DESCRIPTORS)
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
    return acc * SCALE


@triton.jit
def dq_kernel(
    q, k, v, starts, units, out, lse, dout, dq, delta,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, WINDOW: tl.constexpr, FORKS: tl.constexpr, SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, Q_DESCRIPTOR: tl.constexpr, LATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile, and delta for `dkdv_kernel`; grid (query tiles · N // P, B)."""
    row, first, end, pack = query_tile(units, T, K * G // P, BLOCK_M // P, UNIT, UNITS)
    if first >= end:
        return
    gradient = query_gradient(
        q, k, v, starts, out, lse, dout, delta, row, first, end, pack,
        T, K, V, G, P, H, WINDOW, FORKS, SCALE, DESCRIPTORS, Q_DESCRIPTOR, LATE, BLOCK_M, BLOCK_N, BLOCK_H,
    )  # fmt: skip
    store_tile(dq, gradient, row, first, end, pack * P, T, K * G, H, BLOCK_M // P, P, BLOCK_H)


@triton.jit
def key_value_gradients(
    q, k, v, ends, lse, delta, dout, row, first, end, kv_head,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    WINDOW: tl.constexpr, FORKS: tl.constexpr, SCALE: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Return (dk, dv) of one tile, summed over the group of query heads.

    Scores are transposed, [keys, queries], so that no accumulator needs to be.
    """
    N: tl.constexpr = K * G
    TOKENS: tl.constexpr = BLOCK_M // P
    last = end - 1
    lane = tl.arange(0, BLOCK_M)
    keys = first + tl.arange(0, BLOCK_N)
    FAR: tl.constexpr = FORKS and WINDOW > 0
    ends += row * (2 * T if FAR else T)
    stop, all_stop = tl.load(ends + last), tl.load(ends + first)
    stops = tl.load(ends + keys, mask=keys < T, other=0)
    if FAR:
        positions = tl.load(ends + T + keys, mask=keys < T, other=0)
    elif WINDOW > 0:
        stop, all_stop = tl.minimum(stop, last + WINDOW), tl.minimum(all_stop, first + WINDOW)
        stops = tl.minimum(stops, keys + WINDOW)
    if FORKS:  # a beginning's keys are seen further on than its first continuation's
        stop, all_stop = tl.max(stops, 0), -tl.max(-stops, 0)
    k_tile = _load(k, row, first, kv_head, T, K, H, BLOCK_N, 1, BLOCK_H, False)
    v_tile = _load(v, row, first, V - K + kv_head, T, V, H, BLOCK_N, 1, BLOCK_H, False)

    dk_acc = tl.full((BLOCK_N, BLOCK_H), 0.0, tl.float32)
    dv_acc = tl.full((BLOCK_N, BLOCK_H), 0.0, tl.float32)
    for part in range(0, G // P):
        pack = kv_head * (G // P) + part
        for i in range(first, stop, TOKENS):
            tokens = i + lane // P
            stats = ((row * (N // P) + pack) * T + i) * P + lane
            q_tile = _load(q, row, i, pack * P, T, N, H, TOKENS, P, BLOCK_H, DESCRIPTORS)
            dout_tile = _load(dout, row, i, pack * P, T, N, H, TOKENS, P, BLOCK_H, DESCRIPTORS)
            row_lse = tl.load(lse + stats, mask=tokens < T, other=0.0) * LOG2_E
            row_delta = tl.load(delta + stats, mask=tokens < T, other=0.0)
            scores = tl.dot(k_tile, tl.trans(q_tile))
            dweights = tl.dot(v_tile, tl.trans(dout_tile))
            cut = (i < last) | (i + TOKENS > all_stop)
            if FAR:
                cut = i >= first
            if cut:
                visible = (keys[:, None] <= tokens[None, :]) & (tokens[None, :] < stops[:, None])
                if FAR:
                    reached = tl.load(ends + T + tokens, mask=tokens < T, other=0)
                    visible &= reached[None, :] < positions[:, None] + WINDOW
                scores = tl.where(visible, scores, MASKED)
            weights = tl.exp2(scores * (SCALE * LOG2_E) - row_lse[None, :])
            dv_acc = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_acc)
            dscores = weights * (dweights - row_delta[None, :])
            dk_acc = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_acc)
    return dk_acc * SCALE, dv_acc


@triton.jit
def dkdv_kernel(
    q, k, v, ends, units, lse, delta, dout, dk, dv,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, WINDOW: tl.constexpr, FORKS: tl.constexpr, SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile; grid (key tiles · K, B)."""
    row, first, end, head = key_tile(units, T, K, BLOCK_N, UNIT, UNITS)
    if first >= end:
        return
    dkeys, dvalues = key_value_gradients(
        q, k, v, ends, lse, delta, dout, row, first, end, head,
        T, K, V, G, P, H, WINDOW, FORKS, SCALE, DESCRIPTORS, BLOCK_M, BLOCK_N, BLOCK_H,
    )  # fmt: skip
    store_tile(dk, dkeys, row, first, end, head, T, K, H, BLOCK_N, 1, BLOCK_H)
    store_tile(dv, dvalues, row, first, end, V - K + head, T, V, H, BLOCK_N, 1, BLOCK_H)
