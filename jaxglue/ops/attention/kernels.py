"""Triton kernel of packed attention, and tiles and bounds for those of its gradients (`backward_kernels.py`).

FlashAttention-2 (Dao 2023, arXiv 2307.08691) over packed rows. Three choices are specific to packing:

- A program reads the range of its loop with one scalar load from `starts` or `ends`, so tiles outside a segment or
  window cost nothing. Only tiles that cross a boundary evaluate the mask.
- With `forks`, `starts` is [B, 3, T]: beside it lie the bounds of the keys that a query skips, those of the other
  continuation of a forked segment. A tile whose queries all skip a range jumps over it. With a window too, `ends` is
  [B, 2, T], with positions in segments, by which windows go.
- With `split`, queries are some of a row's S tokens: each query's own key is the last line of `starts`, [B, 2, T] or
  [B, 4, T], and the first query at each key or after it follows `ends` of the S keys; positions of keys and of queries
  come last. Windows are in the bounds.
- A tile of queries holds P of the G query heads of a key/value head for block_m // P tokens. Short segments and windows
  waste less of a tile, and a key's gradient is summed over the group inside one program: without atomics,
  deterministically.

Layout: q, dq [B, T, N, H]; k, dk [B, T, K, H]; out, dout [B, T, N, values]; v, dv are the last K heads of [B, T, V,
values]; lse, delta [B, N // P, T, P] float32, lse in natural units. A tile's columns are a power of two, so heads of
queries and keys wider than those of values (latent attention) are tiles of two parts: 192 are 128 and 64. Values are,
too, where that spares columns: heads of 72 (vision towers) are 64 and 16. Offsets of tiles are 64-bit, offsets in a
tile 32-bit. With `descriptors` (compute capability ≥ 9.0), matmul operands come through
TMA, which needs no registers for addresses.

The heads of a tile run consecutively, and the tiles with least to do run last. With a unit of tokens, tiles are parts
of the units in `PackedSegments.units`, and a program without a tile returns at once.

With `late`, a loop's last matmul runs one tile late, while the next tile's exponentials are computed (FlashAttention-3,
Shah et al. 2024, arXiv 2407.08608). The sums and their order stay the same.
"""

from dataclasses import dataclass, replace

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite: a row's sums before its first visible key are wiped without NaNs when that key comes. A power of two: scaling
# it is exact, where a fused multiply-add could leave a large rounding error as exponent. Its square is finite, too.
MASKED = tl.constexpr(-(2.0**60))

# Parts of a head's columns: the first and the rest of queries and keys, and the same of values.
FIRST = tl.constexpr(0)
REST = tl.constexpr(1)
VALUES = tl.constexpr(2)
VALUES_REST = tl.constexpr(3)


@dataclass(frozen=True, kw_only=True)
class AttentionKernelSpec:
    """Constants of a kernel: sizes of the arrays, the visible keys, and tiles."""

    T: int
    """Queries of a row."""
    S: int
    """Keys of a row."""
    K: int
    V: int
    G: int
    P: int
    H: int
    """Head size of queries and keys."""
    values: int
    """Head dim of values."""
    width: int
    """Columns of a tile; see `tile_columns`."""
    rest: int = 0
    """Columns of a second tile of queries and keys, where their heads are wider; 0 for none."""
    scale: float
    window: int
    """0 for none."""
    forks: bool
    split: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    norm_eps: float | None = None
    """Added to a mean square by the norms before rotation; None where there are none."""
    unit: int = 0
    """Tokens of a unit; 0 for tiles as they lie in a row."""
    units: int = 0
    descriptors: bool = False
    q_descriptor: bool = False
    """Queries, which are loaded once, come through TMA, too."""
    k_descriptor: bool = False
    """Keys, which the kernels of their gradients load once, do."""
    late: bool = False
    aligned: bool = False
    """Tiles of keys begin at multiples of their size in a row, wherever a window begins."""
    dkeys: bool = True
    """Sum the gradients of keys."""
    dvalues: bool = True
    """Sum the gradients of values."""
    block_m: int = 0
    """Lines of a tile of queries: tokens times P."""
    block_n: int = 0
    """Keys of a tile."""

    @property
    def keys(self) -> "AttentionKernelSpec":
        """Return the constants for arrays of keys and values."""
        return replace(self, T=self.S)

    @property
    def values_rest(self) -> int:
        """Return the columns of a second tile of values, where their heads are wider than the first; 0 for none."""
        return self.rest if self.values > self.width else 0

    @property
    def bounds(self) -> int:
        """Return the lines of `starts`."""
        return 1 + 2 * self.forks + self.split

    @property
    def far(self) -> bool:
        """Tell whether windows go by positions, for some of a window may be on the other side of a gap."""
        return self.forks and self.window > 0

    @property
    def ends(self) -> int:
        """Return the numbers of a row of `ends`."""
        return self.S * (1 + self.split + self.far) + self.T * (self.split and self.far)

    @property
    def factor(self) -> float:
        """Return the factor from `capped` values to scores."""
        return self.scale if self.softcap is None else self.softcap


@triton.jit
def _unit_tile(units, rank, TOKENS: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Return (first token, end) of a tile of a unit; a token not before the end if there is none."""
    SHARE: tl.constexpr = UNIT // TOKENS
    unit, part = units + rank // SHARE, rank % SHARE
    begin, end = tl.load(unit), tl.load(unit + UNITS)
    first = begin + (SHARE - 1 - part if LAST_FIRST else part) * TOKENS
    return first, tl.minimum(first + TOKENS, end)


@triton.jit
def query_tile(units, spec: tl.constexpr):
    """Return (row, first token, end, pack of heads) of a program; it has no tile if the token is not before the end.

    Late tiles of a document have most work and come first.
    """
    TOKENS: tl.constexpr = spec.block_m // spec.P
    PACKS: tl.constexpr = spec.K * spec.G // spec.P
    row = tl.program_id(1).to(tl.int64)
    rank, pack = tl.program_id(0) // PACKS, tl.program_id(0) % PACKS
    if spec.unit > 0:
        first, end = _unit_tile(units + row * 4 * spec.units, rank, TOKENS, spec.unit, spec.units, True)
    else:
        first = (tl.num_programs(0) // PACKS - 1 - rank) * TOKENS
        end = tl.minimum(first + TOKENS, spec.T)
    return row, first, end, pack


@triton.jit
def key_tile(units, spec: tl.constexpr):
    """Do as `query_tile` for keys of a head; early tiles of a document have most work and come first."""
    row = tl.program_id(1).to(tl.int64)
    rank, head = tl.program_id(0) // spec.K, tl.program_id(0) % spec.K
    if spec.unit > 0:
        first, end = _unit_tile(units + (row * 4 + 2) * spec.units, rank, spec.block_n, spec.unit, spec.units, False)
    else:
        first = rank * spec.block_n
        end = tl.minimum(first + spec.block_n, spec.T)
    return row, first, end, head


@triton.jit
def gaps(starts, tokens, spec: tl.constexpr):
    """Return the keys [from, to) that each token skips; padding and tokens past the row skip all."""
    gap_start = tl.load(starts + spec.T + tokens, mask=tokens < spec.T, other=0)
    return gap_start, tl.load(starts + 2 * spec.T + tokens, mask=tokens < spec.T, other=spec.S)


@triton.jit
def _first_visible(starts, tokens, spec: tl.constexpr):
    """Return the first visible key of each token; T for padding and tokens past the row."""
    low = tl.load(starts + tokens, mask=tokens < spec.T, other=spec.S)
    if spec.window > 0 and not spec.split:
        bound = tokens - spec.window + 1
        if spec.forks:  # skipped keys do not count
            gap_start, gap_end = gaps(starts, tokens, spec)
            bound = tl.where((gap_end > gap_start) & (bound < gap_end), bound - (gap_end - gap_start), bound)
        low = tl.maximum(low, bound)
    return low


@triton.jit
def own_keys(starts, tokens, spec: tl.constexpr):
    """Return the last visible key of each token."""
    if spec.split:
        return tl.load(starts + (spec.bounds - 1) * spec.T + tokens, mask=tokens < spec.T, other=0)
    else:
        return tokens


@triton.jit
def visible_keys(starts, first, last, tokens, spec: tl.constexpr):
    """Return (first visible key of a tile, first that all its queries see, that of each query)."""
    low = _first_visible(starts, first, spec)
    all_low = _first_visible(starts, last, spec)
    lows = _first_visible(starts, tokens, spec)
    if spec.far:  # a second continuation begins further back than a first one ends
        low, all_low = -tl.max(-lows, 0), tl.max(lows, 0)
    return low, all_low, lows


@triton.jit
def jump(gap_starts, gap_ends, low, stop, BLOCK_N: tl.constexpr):
    """Return (loop's end, where it jumps, by how much, first key of the range skipped by all) of a tile of queries."""
    begin, end = tl.max(gap_starts, 0), -tl.max(-gap_ends, 0)
    begin, end = tl.where(end > begin, begin, stop), tl.where(end > begin, end, stop)
    end = tl.maximum(end, low)  # a window may begin after the range
    # The loop counts on as if the keys behind the range followed the tiles before it.
    bend = low + tl.cdiv(tl.maximum(begin - low, 0), BLOCK_N) * BLOCK_N
    return bend + tl.maximum(stop - end, 0), bend, end - bend, begin


@triton.jit
def tile_of(row, token, end, head, HEADS: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr, SIZE: tl.constexpr,
            FROM: tl.constexpr, WIDTH: tl.constexpr, spec: tl.constexpr):  # fmt: skip
    """Return (base, offsets, mask) of the tile [TOKENS·PACK, WIDTH] of tokens before `end` of [B, T, HEADS, SIZE].

    It begins at column FROM.
    """
    lane, column = tl.arange(0, TOKENS * PACK), tl.arange(0, WIDTH)
    base = ((row * spec.T + token) * HEADS + head) * SIZE + FROM
    offsets = ((lane // PACK) * (HEADS * SIZE) + (lane % PACK) * SIZE)[:, None] + column[None, :]
    mask = (token + lane // PACK < end)[:, None]
    if FROM + WIDTH > SIZE:
        mask = mask & (column < SIZE - FROM)[None, :]
    return base, offsets, mask


@triton.jit
def load_tile(source, row, token, head, HEADS: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr,
              DESCRIPTOR: tl.constexpr, PART: tl.constexpr, spec: tl.constexpr):  # fmt: skip
    """Load a tile, by pointer or descriptor; zeros past the head dim, zeros or another row's tokens past the row."""
    SIZE: tl.constexpr = spec.values if PART >= VALUES else spec.H
    FROM: tl.constexpr = spec.width if PART % VALUES == REST else 0
    WIDTH: tl.constexpr = spec.rest if PART % VALUES == REST else spec.width
    if DESCRIPTOR:
        return source.load([(row * spec.T + token).to(tl.int32), head, FROM]).reshape(TOKENS * PACK, WIDTH)
    else:
        base, offsets, mask = tile_of(row, token, spec.T, head, HEADS, TOKENS, PACK, SIZE, FROM, WIDTH, spec)
        return tl.load(source + base + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(target, value, row, token, end, head, HEADS: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr,
               PART: tl.constexpr, spec: tl.constexpr):  # fmt: skip
    """Store a tile's tokens before `end`."""
    SIZE: tl.constexpr = spec.values if PART >= VALUES else spec.H
    FROM: tl.constexpr = spec.width if PART % VALUES == REST else 0
    WIDTH: tl.constexpr = spec.rest if PART % VALUES == REST else spec.width
    base, offsets, mask = tile_of(row, token, end, head, HEADS, TOKENS, PACK, SIZE, FROM, WIDTH, spec)
    tl.store(target + base + offsets, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_heads(target, value, rest, row, token, end, head, HEADS: tl.constexpr, TOKENS: tl.constexpr,
                PACK: tl.constexpr, spec: tl.constexpr):  # fmt: skip
    """Store both parts of a tile like queries' or keys'."""
    store_tile(target, value, row, token, end, head, HEADS, TOKENS, PACK, FIRST, spec)
    if spec.rest > 0:
        store_tile(target, rest, row, token, end, head, HEADS, TOKENS, PACK, REST, spec)


@triton.jit
def store_values(target, value, rest, row, token, end, head, HEADS: tl.constexpr, TOKENS: tl.constexpr,
                 PACK: tl.constexpr, spec: tl.constexpr):  # fmt: skip
    """Store the parts of a tile like values'."""
    store_tile(target, value, row, token, end, head, HEADS, TOKENS, PACK, VALUES, spec)
    if spec.values_rest > 0:
        store_tile(target, rest, row, token, end, head, HEADS, TOKENS, PACK, VALUES_REST, spec)


@triton.jit
def add_values(acc, more, alpha, weights, v, v_rest, row, token, kv_head, spec: tl.constexpr):
    """Return both parts of a tile's sums, scaled by alpha, plus the weighted values of a tile of keys."""
    head = spec.V - spec.K + kv_head
    v_tile = load_tile(v, row, token, head, spec.V, spec.block_n, 1, spec.descriptors, VALUES, spec.keys)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    if spec.values_rest > 0:
        v_more = load_tile(v_rest, row, token, head, spec.V, spec.block_n, 1, spec.descriptors, VALUES_REST, spec.keys)
        more = tl.dot(weights.to(v_more.dtype), v_more, more * alpha[:, None])
    return acc, more


@triton.jit
def capped(products, spec: tl.constexpr):
    """Return the products of queries and keys, or with a softcap tanh(scale · product / softcap)."""
    if spec.softcap is not None:
        return 1.0 - 2.0 / (1.0 + tl.exp2(products * (2.0 * spec.scale * LOG2_E / spec.softcap)))
    else:
        return products


@triton.jit
def weigh(scores, peak, total, spec: tl.constexpr):
    """Return (weights, factor of the sums before, peak, total) of a tile of capped scores.

    Whole peaks rescale by powers of two, exactly: no weight's rounding depends on where tiles begin.
    """
    new_peak = tl.maximum(peak, tl.ceil(tl.max(scores, 1) * (spec.factor * LOG2_E)))
    weights = tl.exp2(scores * (spec.factor * LOG2_E) - new_peak[:, None])
    alpha = tl.exp2(peak - new_peak)
    return weights, alpha, new_peak, total * alpha + tl.sum(weights, 1)


@triton.jit
def begin_sums(sinks, heads, has_sinks: tl.constexpr, LINES: tl.constexpr):
    """Return (peak, total) of lines before their first key; a sink is a key without a value, which begins the sum."""
    peak = tl.full((LINES,), -float("inf"), tl.float32)
    total = tl.full((LINES,), 0.0, tl.float32)
    if has_sinks:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        peak = tl.ceil(sink)
        total += tl.exp2(sink - peak)
    return peak, total


@triton.jit
def last_tile(low, stop, BLOCK_N: tl.constexpr):
    """Return the first key of the last of the tiles from `low` to `stop`; `low` if there are none."""
    return low + tl.maximum(tl.cdiv(stop - low, BLOCK_N) - 1, 0) * BLOCK_N


@triton.jit
def forward_kernel(q, k, v, q_rest, k_rest, v_rest, sinks, starts, units, out, lse, spec: tl.constexpr):
    """Compute output and log-sum-exp of one tile of queries; grid (query tiles · N // P, B)."""
    N: tl.constexpr = spec.K * spec.G
    TOKENS: tl.constexpr = spec.block_m // spec.P
    row, first, end, pack = query_tile(units, spec)
    if first >= end:
        return
    head, kv_head = pack * spec.P, pack * spec.P // spec.G
    last = end - 1
    lane, slots = tl.arange(0, spec.block_m), tl.arange(0, spec.block_n)
    tokens = first + lane // spec.P
    starts += row * (spec.bounds * spec.T)
    low, all_low, lows = visible_keys(starts, first, last, tokens, spec)
    if spec.aligned and spec.window > 0:
        low -= low % spec.block_n
    first_own, last_own = own_keys(starts, first, spec), own_keys(starts, last, spec)
    last_visible = own_keys(starts, tokens, spec)
    q_tile = load_tile(q, row, first, head, N, TOKENS, spec.P, spec.q_descriptor, FIRST, spec)
    if spec.rest > 0:
        q_more = load_tile(q_rest, row, first, head, N, TOKENS, spec.P, spec.q_descriptor, REST, spec)

    peak, total = begin_sums(sinks, head + lane % spec.P, spec.has_sinks, spec.block_m)
    acc = tl.full((spec.block_m, spec.width), 0.0, tl.float32)
    more = tl.full((spec.block_m, spec.values_rest if spec.values_rest > 0 else 1), 0.0, tl.float32)
    stop = last_own + 1
    if spec.forks:
        gap_starts, gap_ends = gaps(starts, tokens, spec)
        any_start, any_end = -tl.max(-tl.where(gap_ends > gap_starts, gap_starts, spec.S), 0), tl.max(gap_ends, 0)
        stop, bend, shift, skipped = jump(gap_starts, gap_ends, low, stop, spec.block_n)
    weights, alpha = tl.full((spec.block_m, spec.block_n), 0.0, tl.float32), tl.full((spec.block_m,), 1.0, tl.float32)
    for i in range(low, stop, spec.block_n):
        j, before = i, tl.maximum(i - spec.block_n, low)
        if spec.forks:
            j, before = tl.where(i < bend, i, i + shift), tl.where(before < bend, before, before + shift)
        k_tile = load_tile(k, row, j, kv_head, spec.K, spec.block_n, 1, spec.descriptors, FIRST, spec.keys)
        scores = tl.dot(q_tile, tl.trans(k_tile))
        if spec.rest > 0:
            k_more = load_tile(k_rest, row, j, kv_head, spec.K, spec.block_n, 1, spec.descriptors, REST, spec.keys)
            scores = tl.dot(q_more, tl.trans(k_more), scores)
        scores = capped(scores, spec)
        if spec.late:  # the product of the tile before runs under this one's exponentials; zeros in the first turn
            acc, more = add_values(acc, more, alpha, weights, v, v_rest, row, before, kv_head, spec)
        # Between these bounds all queries see all keys: most tiles need no mask.
        cut = (j < all_low) | (j + spec.block_n - 1 > first_own)
        if spec.forks:
            cut = cut | ((j < any_end) & (j + spec.block_n > any_start))
        if cut:
            keys = j + slots
            visible = (keys[None, :] <= last_visible[:, None]) & (keys[None, :] >= lows[:, None])
            if spec.forks:
                visible &= (keys[None, :] < gap_starts[:, None]) | (keys[None, :] >= gap_ends[:, None])
                # The last tile before the jump reaches past its beginning: those keys come again, or nobody sees them.
                visible &= (keys[None, :] < skipped) | (i >= bend)
            scores = tl.where(visible, scores, MASKED)
        weights, alpha, peak, total = weigh(scores, peak, total, spec)
        if not spec.late:
            acc, more = add_values(acc, more, alpha, weights, v, v_rest, row, j, kv_head, spec)
    if spec.late:
        j = last_tile(low, stop, spec.block_n)
        if spec.forks:
            j = tl.where(j < bend, j, j + shift)
        acc, more = add_values(acc, more, alpha, weights, v, v_rest, row, j, kv_head, spec)

    seen = (lows <= last_visible) & (tokens < spec.T)  # padding sees nothing: zeros in place of 0 / 0
    total = tl.where(seen, total, 1.0)
    acc = tl.where(seen[:, None], acc / total[:, None], 0.0)
    more = tl.where(seen[:, None], more / total[:, None], 0.0)
    store_values(out, acc, more, row, first, end, head, N, TOKENS, spec.P, spec)
    log_sum = tl.where(seen, (peak + tl.log2(total)) / LOG2_E, 0.0)
    tl.store(lse + ((row * (N // spec.P) + pack) * spec.T + first) * spec.P + lane, log_sum, mask=tokens < end)
