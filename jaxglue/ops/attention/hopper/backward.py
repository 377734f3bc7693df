"""The backward pass in Gluon: one kernel for the gradients of queries, keys and values, five matmuls for each tile.

A program owns a tile of keys, 64 for each of two warpgroups, and walks over the tiles of queries that see them, from
the last to the first, which one warp loads through TMA. Scores are transposed, [keys, queries], so that weights and
their gradients are operands in registers. The next tile's scores are multiplied while a tile's gradient of queries is
handed over.

The gradient of a tile of queries is a sum over programs: two other warps, in turns, store the first program's share in
global memory and add the others', in the order of keys, by a number for each tile that says whose turn it is. Results
are therefore the same in every run. Programs start in the order of keys, so none waits for one that has not started.
They begin with their last queries, which they share, so that each follows the one before it by a tile; from the first
queries on, it would wait until that one came to its own keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from jaxglue.ops.attention.hopper.sums import add_shares
from jaxglue.ops.attention.hopper.tiles import (
    GROUP_ROWS,
    Range,
    Ring,
    Sizes,
    await_place,
    barriers,
    release,
    ring,
    store_rows,
    turn,
    vacate,
)
from jaxglue.ops.attention.kernels import LOG2_E, MASKED


@aggregate
class Tiles:
    """Tiles, statistics and products in shared memory, with the barriers of a program's warps."""

    queries: Ring
    statistics: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor
    dscores: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor
    dq: Ring

    @gluon.constexpr_function
    def __init__(self, queries, statistics, keys, loaded, dscores, stored, dq):
        """Bundle queries beside dout, lse beside delta, keys beside values, and products, with their barriers."""
        self.queries, self.statistics, self.keys, self.loaded = queries, statistics, keys, loaded
        self.dscores, self.stored, self.dq = dscores, stored, dq


@gluon.jit
def _end(ends, key, WINDOW: gl.constexpr):
    """Return the token after the last that sees a key."""
    end = gl.load(ends + key)
    if WINDOW > 0:
        end = gl.minimum(end, key + WINDOW)
    return end


@gluon.jit
def _query_range(ends, first, last, sizes):
    TOKENS: gl.constexpr = GROUP_ROWS // sizes.P
    count = gl.maximum(_end(ends, last, sizes.WINDOW) - first + TOKENS - 1, 0) // TOKENS
    full = gl.minimum((last - first + TOKENS - 1) // TOKENS, count)
    cut = gl.maximum(_end(ends, first, sizes.WINDOW) - first, 0) // TOKENS
    return Range(first, full, gl.minimum(gl.maximum(cut, full), count), count)


@gluon.jit
def _hand_over(dq, tiles, n, GROUP: gl.constexpr):
    """Hand over a warpgroup's half of the n-th tile's gradient of queries."""
    place, parity = turn(tiles.dq, n)
    mbarrier.wait(tiles.dq.empty.index(place), parity ^ 1)
    tiles.dq.tiles.index(2 * place + GROUP).store(dq.reshape([1, GROUP_ROWS, dq.shape[1]]))
    fence_async_shared()
    mbarrier.arrive(tiles.dq.full.index(place), count=1)


@gluon.jit
def _begin_scores(tiles, n, zero, SCORES: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr):
    """Begin the n-th tile's scores."""
    none = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, layout=SCORES)
    keys = tiles.keys.index(zero).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
    query = tiles.queries.tiles.index(2 * await_place(tiles.queries, n)).reshape([GROUP_ROWS, H])
    return warpgroup_mma(keys, query.permute((1, 0)), none, use_acc=False, is_async=True)


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
    _, _, keys, stops, tiles = operands
    SCORES: gl.constexpr = keys.type.layout.parent
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    place, zero = 2 * turn(tiles.queries, n)[0], token >> 31
    query = tiles.queries.tiles.index(place).reshape([GROUP_ROWS, sizes.H])
    dout = tiles.queries.tiles.index(place + 1).reshape([GROUP_ROWS, sizes.H])
    values = tiles.keys.index(zero + 1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
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
def _tiles(begin, end, MASK: gl.constexpr, operands, state, sizes, GROUP: gl.constexpr):
    """Compute the tiles from `begin` to `end` after another of a pack of heads; a tile's dq comes one tile late."""
    first, count, keys, _, tiles = operands
    dk, dv, n = state
    SCORES: gl.constexpr = keys.type.layout.parent
    for i in range(begin, end):
        token = first + (count - 1 - i) * (GROUP_ROWS // sizes.P)
        zero = token >> 31  # 0, which the compiler cannot know: it would keep every address of keys in registers
        dq = _begin_dq(tiles, n - 1, zero, sizes.H, GROUP)
        release(tiles.queries, n - 1)
        scores = _begin_scores(tiles, n, zero, SCORES, sizes.H, GROUP)
        dq = warpgroup_mma_wait(1, deps=[dq])
        _hand_over(dq, tiles, n - 1, GROUP)
        dk, dv = _differentiate_tile(scores, (dk, dv), n, token, MASK, operands, sizes, GROUP)
        n += 1
    return dk, dv, n


@gluon.jit
def _pack(operands, state, bounds, sizes, GROUP: gl.constexpr):
    """Compute all tiles of a pack of heads, of which there is at least one."""
    first, count, keys, _, tiles = operands
    dk, dv, n = state
    token, zero = first + (count - 1) * (GROUP_ROWS // sizes.P), first >> 31
    full, cut = gl.maximum(count - bounds.cut, 1), gl.maximum(count - bounds.full, 1)
    scores = _begin_scores(tiles, n, zero, keys.type.layout.parent, sizes.H, GROUP)
    dk, dv = _differentiate_tile(scores, (dk, dv), n, token, True, operands, sizes, GROUP)
    state = _tiles(1, full, True, operands, (dk, dv, n + 1), sizes, GROUP)
    state = _tiles(full, cut, False, operands, state, sizes, GROUP)
    dk, dv, n = _tiles(cut, count, True, operands, state, sizes, GROUP)
    dq = warpgroup_mma_wait(0, deps=[_begin_dq(tiles, n - 1, zero, sizes.H, GROUP)])
    release(tiles.queries, n - 1)
    _hand_over(dq, tiles, n - 1, GROUP)
    return dk, dv, n


@gluon.jit
def _differentiate(ends, dk_out, dv_out, tiles, row, head, bounds, sizes, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Compute the gradients of a warpgroup's keys and values, and its halves of those of queries."""
    T: gl.constexpr = sizes.T
    H: gl.constexpr = sizes.H
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP_ROWS, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    first = bounds.first + GROUP * GROUP_ROWS
    keys = first + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
    stops = gl.load(ends + keys, mask=keys < T, other=0)
    if sizes.WINDOW > 0:
        stops = gl.minimum(stops, keys + sizes.WINDOW)
    dk = gl.zeros([GROUP_ROWS, H], gl.float32, layout=GRADIENT)
    dv = gl.zeros([GROUP_ROWS, H], gl.float32, layout=GRADIENT)
    mbarrier.wait(tiles.loaded.index(0), 0)
    n = gl.to_tensor(0)
    operands = bounds.first, bounds.count, keys, stops, tiles
    if bounds.count > 0:
        for _ in range(sizes.G // sizes.P):
            dk, dv, n = _pack(operands, (dk, dv, n), bounds, sizes, GROUP)
    values = tiles.keys.index(1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)  # only this warpgroup's
    store_rows(dk_out, dk * sizes.SCALE, values, row, first, head, T, HEADS, H, 1)
    store_rows(dv_out, dv, values, row, first, head, T, HEADS, H, 1)


@gluon.jit
def _load_tiles(q, k, v, lse, delta, dout, tiles, start, plane, kv_head, bounds, sizes):
    """Load the tile of keys and values, and all tiles of queries and dout with their statistics."""
    P: gl.constexpr = sizes.P
    BYTES: gl.constexpr = 2 * (q.block_type.nbytes + lse.block_type.nbytes)
    loaded = tiles.loaded.index(0)
    mbarrier.expect(loaded, 2 * k.block_type.nbytes)
    tma.async_copy_global_to_shared(k, [start, kv_head * sizes.H], loaded, tiles.keys.index(0))
    tma.async_copy_global_to_shared(v, [start, kv_head * sizes.H], loaded, tiles.keys.index(1))
    n = gl.to_tensor(0)
    for part in range(sizes.G // P):
        for late in range(bounds.count):
            i = bounds.count - 1 - late
            rows = [start + i * (GROUP_ROWS // P), kv_head * sizes.G + part * P, 0]
            line = [plane + part, bounds.first * P + i * GROUP_ROWS]
            place, full = vacate(tiles.queries, n, BYTES)
            tma.async_copy_global_to_shared(q, rows, full, tiles.queries.tiles.index(2 * place))
            tma.async_copy_global_to_shared(lse, line, full, tiles.statistics.index(2 * place))
            tma.async_copy_global_to_shared(dout, rows, full, tiles.queries.tiles.index(2 * place + 1))
            tma.async_copy_global_to_shared(delta, line, full, tiles.statistics.index(2 * place + 1))
            n += 1


@gluon.jit
def _allocate(q, k, lse, dq, STAGES: gl.constexpr, P: gl.constexpr, H: gl.constexpr):
    """Return the tiles in shared memory."""
    ROWS: gl.constexpr = 2 * GROUP_ROWS
    queries = ring(gl.allocate_shared_memory(q.dtype, [2 * STAGES, GROUP_ROWS // P, P, H], q.layout), STAGES)
    statistics = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, GROUP_ROWS], lse.layout)
    keys = gl.allocate_shared_memory(k.dtype, [2, ROWS, H], k.layout)
    dscores = gl.allocate_shared_memory(k.dtype, [2, ROWS, GROUP_ROWS], k.layout)
    halves = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, GROUP_ROWS, H // 2], dq.layout)
    handed = Ring(halves, barriers(STAGES, 2), barriers(STAGES, 1))
    return Tiles(queries, statistics, keys, barriers(1, 1), dscores, barriers(1, 2), handed)


@gluon.jit
def backward_kernel(
    q, k, v, ends, lse, delta, dout, first_head, dq, turns, dk, dv, T: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    P: gl.constexpr, H: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile, summed over the group of query heads, and its share of dq.

    The grid is (HEADS · tiles, B), one head after another: sums of one stay in the L2 cache. dq, dk and dv are those of
    HEADS key/value heads from `first_head` on. lse is in units of exponentials of 2; turns begin as zeros. dq
    [B · HEADS · G // P, T · P, H] float32 is left as it was where no query sees a key.
    """
    sizes = Sizes(T, K, G, P, H, WINDOW, SCALE)
    TILES: gl.constexpr = (T + 2 * GROUP_ROWS - 1) // (2 * GROUP_ROWS)
    tile, head, row = gl.program_id(0) % TILES, gl.program_id(0) // TILES, gl.program_id(1).to(gl.int64)
    kv_head = gl.load(first_head) + head
    first, row_ends = tile * (2 * GROUP_ROWS), ends + row * T
    plane = (row.to(gl.int32) * K + kv_head) * (G // P)
    dq_plane = (row.to(gl.int32) * HEADS + head) * (G // P)
    bounds = _query_range(row_ends, first, gl.minimum(first + 2 * GROUP_ROWS, T) - 1, sizes)
    before = gl.where(tile > 0, _end(row_ends, gl.maximum(first - 1, 0), WINDOW), 0)
    tiles = _allocate(q, k, lse, dq, STAGES, P, H)
    fence_async_shared()
    gl.barrier()
    source = (q, k, v, lse, delta, dout, tiles, (row * T + first).to(gl.int32), plane, kv_head, bounds, sizes)
    gl.warp_specialize(
        [
            (_differentiate, (row_ends, dk, dv, tiles, row, head, bounds, sizes, HEADS, 0)),
            (_differentiate, (row_ends, dk, dv, tiles, row, head, bounds, sizes, HEADS, 1)),
            (_load_tiles, source),
            (add_shares, (dq, turns, tiles.dq, dq_plane, tile, before, bounds, sizes, 0)),
            (add_shares, (dq, turns, tiles.dq, dq_plane, tile, before, bounds, sizes, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
