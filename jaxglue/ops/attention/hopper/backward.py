"""The backward pass in Gluon: one kernel for the gradients of queries, keys and values, five matmuls for each tile.

A program owns a tile of keys, 64 for each of two warpgroups, and walks over the tiles of queries that see them, from
the last to the first, which one warp loads through TMA. Scores are transposed, [keys, queries], so that weights and
their gradients are operands in registers. The next tile's scores are multiplied while a tile's gradient of queries is
handed over. `visits` has the order of heads that do not fit a tile.

The gradient of a tile of queries is a sum over programs: two other warps, in turns, store the first program's share in
global memory and add the others', in the order of keys, by a number for each tile that says whose turn it is. Results
are therefore the same in every run. Programs start in the order of keys, so none waits for one that has not started.
They begin with their last queries, which they share, so that each follows the one before it by a tile; from the first
queries on, it would wait until that one came to its own keys. The programs that start last round finished sums to the
gradient's dtype, while the last of the others still compute.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxglue.ops.attention.hopper.backward_tiles import allocate, load_tiles, query_range
from jaxglue.ops.attention.hopper.sums import add_shares, load_sums, round_sums, visible_end
from jaxglue.ops.attention.hopper.tiles import Range, Sizes, store_rows
from jaxglue.ops.attention.hopper.visits import visited_between
from jaxglue.ops.attention.kernels import LOG2_E, MASKED
from jaxglue.ops.tile_ring import GROUP_ROWS, await_place, release, turn


@gluon.jit
def _hand_over(dq, tiles, n, GROUP: gl.constexpr):
    """Hand over a warpgroup's half of the n-th tile's gradient of queries."""
    place, parity = turn(tiles.dq, n)
    mbarrier.wait(tiles.dq.empty.index(place), parity ^ 1)
    tiles.dq.tiles.index(2 * place + GROUP).store(dq.reshape([1, GROUP_ROWS, dq.shape[1]]))
    fence_async_shared()
    mbarrier.arrive(tiles.dq.full.index(place), count=1)


@gluon.jit
def _hold(tiles, SCORES: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr):
    """Return a warpgroup's keys and values in registers, where narrow heads leave room there."""
    if H <= 64:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
        keys = tiles.keys.index(0).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
        values = tiles.keys.index(1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
        return keys.load(OPERAND), values.load(OPERAND)
    else:
        return 0, 0


@gluon.jit
def _own(held, which: gl.constexpr, tiles, zero, H: gl.constexpr, GROUP: gl.constexpr):
    """Return a warpgroup's keys (0) or values (1) as an operand."""
    if H <= 64:
        return held[which]
    else:
        return tiles.keys.index(zero + which).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)


@gluon.jit
def _begin_scores(own, tiles, n, SCORES: gl.constexpr, H: gl.constexpr):
    """Begin the n-th tile's scores."""
    none = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, layout=SCORES)
    query = tiles.queries.tiles.index(2 * await_place(tiles.queries, n)).reshape([GROUP_ROWS, H])
    return warpgroup_mma(own, query.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _begin_dq(tiles, n, zero, H: gl.constexpr, GROUP: gl.constexpr):
    """Begin a warpgroup's half of the n-th tile's gradient of queries, once both have stored the scores' gradients."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H // 2, 16])
    none = gl.zeros([GROUP_ROWS, H // 2], gl.float32, layout=HALF)
    mbarrier.wait(tiles.stored.index(0), n & 1)
    keys = tiles.keys.index(zero).slice(GROUP * (H // 2), H // 2, dim=1)
    return warpgroup_mma(tiles.dscores.index(n & 1).permute((1, 0)), keys, none, use_acc=False, is_async=True)


@gluon.jit
def _differentiate_tile(scores, sums, n, token, MASK: gl.constexpr, operands, sizes, GROUP: gl.constexpr):
    """Add the n-th tile's products to (dk, dv), and store the gradients of its scores."""
    dk, dv = sums
    _, keys, stops, tiles, held = operands
    SCORES: gl.constexpr = keys.type.layout.parent
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    place, zero = 2 * turn(tiles.queries, n)[0], token >> 31
    query = tiles.queries.tiles.index(place).reshape([GROUP_ROWS, sizes.H])
    dout = tiles.queries.tiles.index(place + 1).reshape([GROUP_ROWS, sizes.H])
    values = _own(held, 1, tiles, zero, sizes.H, GROUP)
    none = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, layout=SCORES)
    dweights = warpgroup_mma(values, dout.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if MASK:
        tokens = token + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(0, SCORES)) // sizes.P
        visible = (keys[:, None] <= tokens[None, :]) & (tokens[None, :] < stops[:, None])
        scores = gl.where(visible, scores, MASKED)
    weights = gl.exp2(scores * (sizes.SCALE * LOG2_E) - tiles.statistics.index(place).load(SCORES))
    operand = gl.convert_layout(weights.to(query.dtype), OPERAND)
    # The tile came long ago: branches keep the assembler from moving a wait up, and a matmul's parts down.
    await_place(tiles.queries, n)
    dweights = warpgroup_mma_wait(0, deps=[dweights])
    dv = warpgroup_mma(operand, dout, dv, is_async=True)
    await_place(tiles.queries, n)
    dscores = (weights * (dweights - tiles.statistics.index(place + 1).load(SCORES))).to(query.dtype)
    dk = warpgroup_mma(gl.convert_layout(dscores, OPERAND), query, dk, is_async=True)
    # The other warpgroup has left the tile of two tiles ago, for it has stored its part of the tile before.
    tiles.dscores.index(n & 1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0).store(dscores)
    fence_async_shared()
    mbarrier.arrive(tiles.stored.index(0), count=1)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    return dk, dv


@gluon.jit
def _tiles(begin, end, MASK: gl.constexpr, operands, sums, sizes, GROUP: gl.constexpr):
    """Add the tiles from `begin` to `end`, but for the very first, to (dk, dv); a tile's dq comes one tile late."""
    PARTS: gl.constexpr = sizes.G // sizes.P
    bounds, keys, _, tiles, held = operands
    dk, dv = sums
    SCORES: gl.constexpr = keys.type.layout.parent
    for n in range(gl.maximum(begin * PARTS, 1), end * PARTS):
        token = bounds.first + n  # any one, where no mask needs it
        if MASK:
            token = bounds.first + visited_between(n, begin, end, bounds, sizes)[1] * (GROUP_ROWS // sizes.P)
        zero = token >> 31  # 0, which the compiler cannot know: it would keep every address of keys in registers
        dq = _begin_dq(tiles, n - 1, zero, sizes.H, GROUP)
        release(tiles.queries, n - 1)
        scores = _begin_scores(_own(held, 0, tiles, zero, sizes.H, GROUP), tiles, n, SCORES, sizes.H)
        dq = warpgroup_mma_wait(1, deps=[dq])
        _hand_over(dq, tiles, n - 1, GROUP)
        dk, dv = _differentiate_tile(scores, (dk, dv), n, token, MASK, operands, sizes, GROUP)
    return dk, dv


@gluon.jit
def _all_tiles(operands, dk, dv, sizes, GROUP: gl.constexpr):
    """Add all tiles, of which there is at least one, to (dk, dv)."""
    bounds, keys, _, tiles, held = operands
    first, count = bounds.first, bounds.count
    token, zero = first + (count - 1) * (GROUP_ROWS // sizes.P), first >> 31
    late, early, last = count - bounds.cut, count - bounds.full, count * (sizes.G // sizes.P) - 1
    own = _own(held, 0, tiles, zero, sizes.H, GROUP)
    scores = _begin_scores(own, tiles, 0, keys.type.layout.parent, sizes.H)
    sums = _differentiate_tile(scores, (dk, dv), 0, token, True, operands, sizes, GROUP)
    sums = _tiles(0, late, True, operands, sums, sizes, GROUP)
    sums = _tiles(late, early, False, operands, sums, sizes, GROUP)
    dk, dv = _tiles(early, count, True, operands, sums, sizes, GROUP)
    dq = warpgroup_mma_wait(0, deps=[_begin_dq(tiles, last, zero, sizes.H, GROUP)])
    release(tiles.queries, last)
    _hand_over(dq, tiles, last, GROUP)
    return dk, dv


@gluon.jit
def _differentiate(ends, dk_out, dv_out, tiles, row, head, first, bounds, sizes, HEADS: gl.constexpr,
                   GROUP: gl.constexpr):  # fmt: skip
    """Compute the gradients of a warpgroup's keys and values, and its halves of those of queries."""
    S: gl.constexpr = sizes.S
    H: gl.constexpr = sizes.H
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP_ROWS, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    first = (first if sizes.SPLIT else bounds.first) + GROUP * GROUP_ROWS
    keys = first + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
    stops = gl.load(ends + keys, mask=keys < S, other=0)
    if sizes.WINDOW > 0:
        stops = gl.minimum(stops, keys + sizes.WINDOW)
    if sizes.SPLIT:  # a key's first query
        keys = gl.load(ends + S + keys, mask=keys < S, other=0)
    dk = gl.zeros([GROUP_ROWS, H], gl.float32, layout=GRADIENT)
    dv = gl.zeros([GROUP_ROWS, H], gl.float32, layout=GRADIENT)
    if bounds.count > 0:
        mbarrier.wait(tiles.loaded.index(0), 0)
        held = _hold(tiles, SCORES, H, GROUP)
        dk, dv = _all_tiles((bounds, keys, stops, tiles, held), dk, dv, sizes, GROUP)
    values = tiles.keys.index(1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)  # only this warpgroup's
    store_rows(dk_out, dk * sizes.SCALE, values, row, first, head, S, HEADS, H, 1)
    store_rows(dv_out, dv, values, row, first, head, S, HEADS, H, 1)


@gluon.jit
def _compute(ends, dk, dv, sums, dq, tiles, row, head, first, bounds, rounded, sizes, HEADS: gl.constexpr,
             GROUP: gl.constexpr):  # fmt: skip
    """Differentiate keys from `first` on, or round so many tiles of sums; without SPLIT from the bounds' first one."""
    if rounded > 0:
        token = first if sizes.SPLIT else bounds.first
        round_sums(sums, dq, tiles.queries, ends, row, head, token, rounded, sizes, HEADS, GROUP)
    else:
        _differentiate(ends, dk, dv, tiles, row, head, first, bounds, sizes, HEADS, GROUP)


@gluon.jit
def _load(source, finished):
    """Load a program's tiles to differentiate, or its finished sums."""
    q, k, v, lse, delta, dout, tiles, start, key, plane, kv_head, bounds, sizes = source
    load_tiles(q, k, v, lse, delta, dout, tiles, start, key, plane, kv_head, bounds, sizes)
    sums, turns, queries, ends, dq_plane, first, count, _ = finished
    load_sums(sums, turns, queries, ends, dq_plane, first, count, sizes)


@gluon.jit
def backward_kernel(
    q, k, v, ends, lse, delta, dout, first_head, sums, turns, dk, dv, dq, T: gl.constexpr, S: gl.constexpr,
    K: gl.constexpr, G: gl.constexpr, P: gl.constexpr, H: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr,
    SPLIT: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, SPAN: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile, summed over the group of query heads, and its share of dq; or round sums to dq.

    The grid is ROWS · HEADS · tiles, one head after another: sums of one stay in the L2 cache. As many again over SPAN
    then round the sums, each of SPAN tiles of tokens, while the last of the others compute. dq, dk and dv are those of
    HEADS key/value heads from `first_head` on. lse is in units of exponentials of 2; turns begin as zeros. Sums [ROWS ·
    HEADS · G // P, T · P, H] float32 are left as they were where no query sees a key. With SPLIT, ends [B, 2 · S + T]
    have the end of each key's queries, the first of them, and each query's own key.
    """
    sizes = Sizes(T, S, K, G, P, H, WINDOW, SCALE, SPLIT, CHUNK)
    KEYS: gl.constexpr = 2 * GROUP_ROWS
    TILES: gl.constexpr = (S + KEYS - 1) // KEYS
    ROUNDED: gl.constexpr = (T + KEYS - 1) // KEYS
    index = gl.program_id(0)
    rounds = index >= ROWS * HEADS * TILES
    index = gl.where(rounds, index - ROWS * HEADS * TILES, index)
    tiles_of_head = gl.where(rounds, (ROUNDED + SPAN - 1) // SPAN, TILES)
    tile, plane = index % tiles_of_head, index // tiles_of_head
    head, row = plane % HEADS, (plane // HEADS).to(gl.int64)
    kv_head = gl.load(first_head) + head
    first, row_ends = tile * gl.where(rounds, SPAN * KEYS, KEYS), ends + row * (2 * S + T if SPLIT else S)
    plane = (row.to(gl.int32) * K + kv_head) * (G // P)
    dq_plane = (row.to(gl.int32) * HEADS + head) * (G // P)
    bounds = query_range(row_ends, first, gl.minimum(first + KEYS, S) - 1, sizes)
    bounds = Range(bounds.first, bounds.full, bounds.cut, gl.where(rounds, 0, bounds.count))
    tokens = gl.minimum(first + SPAN * KEYS, T) - first
    rounded = gl.where(rounds, (tokens * P + GROUP_ROWS - 1) // GROUP_ROWS * (G // P), 0)
    before = gl.where(tile > 0, visible_end(row_ends, gl.maximum(first - 1, 0), WINDOW), 0)
    tiles = allocate(q, k, lse, sums, STAGES, P, H)
    fence_async_shared()
    gl.barrier()
    start = (row * T + bounds.first).to(gl.int32)
    # Without SPLIT the same numbers: no registers for them twice.
    key, other = ((row * S + first).to(gl.int32), first) if SPLIT else (0, 0)
    source = (q, k, v, lse, delta, dout, tiles, start, key, plane, kv_head, bounds, sizes)
    finished = (sums, turns, tiles.queries, row_ends, dq_plane, first, rounded, sizes)
    gl.warp_specialize(
        [
            (_compute, (row_ends, dk, dv, sums, dq, tiles, row, head, other, bounds, rounded, sizes, HEADS, 0)),
            (_compute, (row_ends, dk, dv, sums, dq, tiles, row, head, other, bounds, rounded, sizes, HEADS, 1)),
            (_load, (source, finished)),
            (add_shares, (sums, turns, tiles.dq, dq_plane, tile, before, bounds, sizes, 0)),
            (add_shares, (sums, turns, tiles.dq, dq_plane, tile, before, bounds, sizes, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
