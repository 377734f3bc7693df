"""The forward pass in Gluon: FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608) over packed rows.

One warp loads keys and values through TMA. Two warpgroups compute 64 query rows each: a tile's second matmul runs under
the exponentials of the next tile, and one warpgroup's matmuls under the other's exponentials.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxglue.ops.attention.hopper.tiles import AttentionSizes, TileRange, load_rows, store_rows
from jaxglue.ops.attention.kernels import LOG2_E, MASKED
from jaxglue.ops.tile_ring import GROUP_ROWS, await_tile, load, release, ring, turn, vacate


@gluon.jit
def _first_visible(starts, tokens, sizes):
    """Return the first visible key of each token; S for padding and tokens past the row."""
    low = gl.load(starts + tokens, mask=tokens < sizes.T, other=sizes.S)
    if sizes.WINDOW > 0:
        low = gl.maximum(low, tokens - sizes.WINDOW + 1)
    return low


@gluon.jit
def _own_keys(starts, tokens, sizes):
    """Return the last visible key of each token."""
    if sizes.SPLIT:
        return gl.load(starts + sizes.T + tokens, mask=tokens < sizes.T, other=0)
    else:
        return tokens


@gluon.jit
def _key_range(starts, first, last, BLOCK_N: gl.constexpr, sizes):
    """Return the tiles of keys for the queries from `first` to `last`: at least one, for the loops' sake."""
    low, all_low = _first_visible(starts, first, sizes), _first_visible(starts, last, sizes)
    first, last = _own_keys(starts, first, sizes), _own_keys(starts, last, sizes)
    low, all_low = gl.minimum(low, last), gl.minimum(all_low, last + 1)
    count = (last - low) // BLOCK_N + 1
    full = gl.minimum(gl.maximum((all_low - low + BLOCK_N - 1) // BLOCK_N, 1), count)
    cut = gl.minimum(gl.maximum(gl.maximum(first + 1 - low, 0) // BLOCK_N, full), count)
    return TileRange(low, full, cut, count)


@gluon.jit
def _softmax(scores, peak, total, key, tokens, lows, MASK: gl.constexpr, sizes):
    """Return (weights, factor of the sums before, peak, total) after a tile of scores from this key on."""
    FACTOR: gl.constexpr = (sizes.SCALE if sizes.SOFTCAP is None else sizes.SOFTCAP) * LOG2_E
    if sizes.SOFTCAP is not None:  # tanh(scale · score / softcap)
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(scores * (2.0 * sizes.SCALE * LOG2_E / sizes.SOFTCAP)))
    if MASK:
        keys = key + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        visible = (keys[None, :] <= tokens[:, None]) & (keys[None, :] >= lows[:, None])
        scores = gl.where(visible, scores, MASKED)
    new_peak = gl.maximum(peak, gl.ceil(gl.max(scores, 1) * FACTOR))  # whole: see the Triton kernel
    weights = gl.exp2(scores * FACTOR - new_peak[:, None])
    alpha = gl.exp2(peak - new_peak)
    return weights, alpha, new_peak, total * alpha + gl.sum(weights, 1)


@gluon.jit
def _tiles(begin, end, MASK: gl.constexpr, operands, state, sizes):
    """Compute the tiles from `begin` to `end`; the values of a tile are multiplied one tile late."""
    low, query, keys, values, tokens, lows, query_rest, keys_rest = operands
    weights, acc, peak, total = state
    BLOCK_N: gl.constexpr = keys.tiles.shape[1]
    SCORES: gl.constexpr = tokens.type.layout.parent
    none = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout=SCORES)
    for i in range(begin, end):
        key_tile = await_tile(keys, i)
        scores = warpgroup_mma(query, key_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        if sizes.REST > 0:
            rest_tile = keys_rest.index(turn(keys, i)[0])
            scores = warpgroup_mma(query_rest, rest_tile.permute((1, 0)), scores, is_async=True)
        acc = warpgroup_mma(weights, await_tile(values, i - 1), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        release(keys, i)
        new_weights, alpha, peak, total = _softmax(scores, peak, total, low + i * BLOCK_N, tokens, lows, MASK, sizes)
        new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
        # The tile came long ago: the assembler would wait for the matmul before the exponentials without this branch.
        await_tile(values, i - 1)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        release(values, i - 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = new_weights
    return weights, acc, peak, total


@gluon.jit
def _attend(q, sinks, starts, out, lse, tiles, row, head, first, bounds, sizes, GROUP: gl.constexpr,
            HAS_SINKS: gl.constexpr):  # fmt: skip
    """Compute the output and log-sum-exp of a warpgroup's rows."""
    queries, keys, values, queries_rest, keys_rest = tiles
    T: gl.constexpr = sizes.T
    P: gl.constexpr = sizes.P
    H: gl.constexpr = sizes.H
    V: gl.constexpr = sizes.V
    N: gl.constexpr = sizes.K * sizes.G
    BLOCK_N: gl.constexpr = keys.tiles.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    token = first + GROUP * (GROUP_ROWS // P)
    query = queries.index(GROUP)
    load_rows(q, query, row, token, head, T, N, H, P)
    query_rest = query
    if sizes.REST > 0:
        query_rest = queries_rest.index(GROUP)
        load_rows(q + V, query_rest, row, token, head, T, N, H, P)
    if H > 128:
        fence_async_shared()  # the tensor cores read queries from shared memory
    gl.barrier()  # rows are read by other threads than loaded them
    # The sums of wide heads leave no registers for queries.
    held = query.load(gl.DotOperandLayout(0, SCORES, 2)) if V <= 128 else query
    lane = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
    tokens = token + lane // P
    starts += row * (2 * T if sizes.SPLIT else T)
    lows, last_visible = _first_visible(starts, tokens, sizes), _own_keys(starts, tokens, sizes)
    if HAS_SINKS:
        sink = gl.load(sinks + head + lane % P).to(gl.float32) * LOG2_E
        peak = gl.ceil(sink)
        total = gl.exp2(sink - peak)
    else:
        peak = gl.full([GROUP_ROWS], -float("inf"), gl.float32, layout=lane.type.layout)
        total = gl.full([GROUP_ROWS], 0.0, gl.float32, layout=lane.type.layout)
    acc = gl.zeros([GROUP_ROWS, V], gl.float32, layout=OUT)
    none = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout=SCORES)
    scores = warpgroup_mma(held, await_tile(keys, 0).permute((1, 0)), none, use_acc=False)
    if sizes.REST > 0:
        scores = warpgroup_mma(query_rest, keys_rest.index(0).permute((1, 0)), scores)
    release(keys, 0)
    weights, _, peak, total = _softmax(scores, peak, total, bounds.first, last_visible, lows, True, sizes)
    weights = gl.convert_layout(weights.to(q.dtype.element_ty), WEIGHTS)
    operands = bounds.first, held, keys, values, last_visible, lows, query_rest, keys_rest
    state = _tiles(1, bounds.full, True, operands, (weights, acc, peak, total), sizes)
    state = _tiles(bounds.full, bounds.cut, False, operands, state, sizes)
    weights, acc, peak, total = _tiles(bounds.cut, bounds.count, True, operands, state, sizes)
    acc = warpgroup_mma(weights, await_tile(values, bounds.count - 1), acc)
    seen = (lows <= last_visible) & (tokens < T)
    share = gl.convert_layout(gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0), gl.SliceLayout(1, OUT))[:, None]
    store_rows(out, gl.where(share != 0, acc * share, 0.0), query, row, token, head, T, N, V, P)
    log_sum = gl.where(seen, (peak + gl.log2(gl.where(seen, total, 1.0))) / LOG2_E, 0.0)
    gl.store(lse + ((row * (N // P) + head // P) * T + token) * P + lane, log_sum, mask=tokens < T)


@gluon.jit
def _load_tiles(k, k_rest, v, keys, keys_rest, values, token, head, count, sizes):
    """Load the tiles of keys and values."""
    BLOCK_N: gl.constexpr = keys.tiles.shape[1]
    BYTES: gl.constexpr = k.block_type.nbytes + (k_rest.block_type.nbytes if sizes.REST > 0 else 0)
    for i in range(count):
        slot, full = vacate(keys, i, BYTES)
        rows = token + i * BLOCK_N
        tma.async_copy_global_to_shared(k, [rows, head * sizes.H], full, keys.tiles.index(slot))
        if sizes.REST > 0:
            tma.async_copy_global_to_shared(k_rest, [rows, head * sizes.H + sizes.V], full, keys_rest.index(slot))
        load(values, i, v, [rows, head * sizes.V])


@gluon.jit
def forward_kernel(
    q, k, k_rest, v, sinks, starts, out, lse, T: gl.constexpr, S: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    P: gl.constexpr, H: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, SPLIT: gl.constexpr,
    SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of one tile of queries; grid (query tiles · N // P, B).

    Programs that run together share a key/value head, whose keys and values then come from the L2 cache. Columns of
    keys beyond those of values come by a descriptor of their own; k_rest is k where there are none. With SPLIT,
    starts [B, 2, T] have queries' first keys, and their own.
    """
    sizes = AttentionSizes(T, S, K, G, P, H, WINDOW, SCALE, SPLIT, V, SOFTCAP=SOFTCAP)
    PARTS: gl.constexpr = G // P
    TOKENS: gl.constexpr = 2 * GROUP_ROWS // P
    TILES: gl.constexpr = (T + TOKENS - 1) // TOKENS
    KEYS: gl.constexpr = k.block_type.shape[0]
    index, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    head = index // (TILES * PARTS) * G + index % PARTS * P
    first = (TILES - 1 - index // PARTS % TILES) * TOKENS  # most work comes first
    row_starts = starts + row * (2 * T if SPLIT else T)
    bounds = _key_range(row_starts, first, gl.minimum(first + TOKENS, T) - 1, KEYS, sizes)
    keys = ring(gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, V], k.layout), STAGES)
    values = ring(gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, V], v.layout), STAGES)
    queries = gl.allocate_shared_memory(k.dtype, [2, GROUP_ROWS, V], k.layout)
    keys_rest, queries_rest = keys.tiles, queries
    if sizes.REST > 0:
        keys_rest = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, sizes.REST], k_rest.layout)
        queries_rest = gl.allocate_shared_memory(k.dtype, [2, GROUP_ROWS, sizes.REST], k_rest.layout)
    # Barriers were initialized by one thread, and TMA, which signals them, sees shared memory after a fence alone.
    fence_async_shared()
    gl.barrier()
    start = (row * S + bounds.first).to(gl.int32)
    source = (k, k_rest, v, keys, keys_rest, values, start, head // G, bounds.count, sizes)
    tiles = (queries, keys, values, queries_rest, keys_rest)
    gl.warp_specialize(
        [
            (_attend, (q, sinks, starts, out, lse, tiles, row, head, first, bounds, sizes, 0, HAS_SINKS)),
            (_attend, (q, sinks, starts, out, lse, tiles, row, head, first, bounds, sizes, 1, HAS_SINKS)),
            (_load_tiles, source),
        ],
        [4, 1],
        [240, 24],
    )
