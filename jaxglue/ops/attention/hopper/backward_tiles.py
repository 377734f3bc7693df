"""Tiles of the backward kernel: places in shared memory, the range that a program visits, and their loads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from jaxglue.ops.attention.hopper.sums import visible_end
from jaxglue.ops.attention.hopper.tiles import TileRange
from jaxglue.ops.attention.hopper.visits import visited
from jaxglue.ops.tile_ring import GROUP_ROWS, Ring, barriers, ring, vacate


@aggregate
class BackwardTiles:
    """Tiles, statistics and products in shared memory, with the barriers of a program's warps."""

    queries: Ring
    queries_rest: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    keys_rest: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor
    dscores: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor
    dq: Ring
    dq_rest: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries, queries_rest, statistics, keys, keys_rest, loaded, dscores, stored, read, dq, dq_rest):
        """Bundle queries beside dout, lse beside delta, keys beside values, and products, with their barriers."""
        self.queries, self.queries_rest, self.statistics = queries, queries_rest, statistics
        self.keys, self.keys_rest, self.loaded = keys, keys_rest, loaded
        self.dscores, self.stored, self.read, self.dq, self.dq_rest = dscores, stored, read, dq, dq_rest


@gluon.jit
def query_range(ends, first, last, sizes):
    """Return the tiles of queries that see keys from `first` to `last`."""
    TOKENS: gl.constexpr = GROUP_ROWS // sizes.P
    if sizes.SPLIT:
        end, all_end = gl.load(ends + last), gl.load(ends + first)
        # Programs share tiles, which begin at multiples of their tokens.
        first = gl.load(ends + sizes.S + first) // TOKENS * TOKENS
        last = gl.load(ends + sizes.S + last)
    else:
        end, all_end = visible_end(ends, last, sizes.WINDOW), visible_end(ends, first, sizes.WINDOW)
    count = gl.maximum(end - first + TOKENS - 1, 0) // TOKENS
    full = gl.minimum((last - first + TOKENS - 1) // TOKENS, count)
    cut = gl.maximum(all_end - first, 0) // TOKENS
    return TileRange(first, full, gl.minimum(gl.maximum(cut, full), count), count)


@gluon.jit
def allocate(q, k, lse, dq, q_rest, k_rest, dq_rest, STAGES: gl.constexpr, P: gl.constexpr, sizes):
    """Return the tiles in shared memory.

    The rests of wide queries and keys leave room for one place of the gradients of scores and of queries.
    """
    ROWS: gl.constexpr = 2 * GROUP_ROWS
    V: gl.constexpr = sizes.V
    REST: gl.constexpr = sizes.REST
    TOKENS: gl.constexpr = GROUP_ROWS // P
    PLACES: gl.constexpr = 1 if REST > 0 else STAGES
    queries = ring(gl.allocate_shared_memory(q.dtype, [2 * STAGES, TOKENS, P, V], q.layout), STAGES)
    statistics = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, GROUP_ROWS], lse.layout)
    keys = gl.allocate_shared_memory(k.dtype, [2, ROWS, V], k.layout)
    dscores = gl.allocate_shared_memory(k.dtype, [1 if REST > 0 else 2, ROWS, GROUP_ROWS], k.layout)
    halves = gl.allocate_shared_memory(gl.float32, [2 * PLACES, 1, GROUP_ROWS, V // 2], dq.layout)
    handed = Ring(halves, barriers(PLACES, 2), barriers(PLACES, 1))
    queries_rest, keys_rest, halves_rest = queries.tiles, keys, halves
    if REST > 0:
        queries_rest = gl.allocate_shared_memory(q.dtype, [STAGES, TOKENS, P, REST], q_rest.layout)
        keys_rest = gl.allocate_shared_memory(k.dtype, [1, ROWS, REST], k_rest.layout)
        halves_rest = gl.allocate_shared_memory(gl.float32, [2 * PLACES, 1, GROUP_ROWS, REST // 2], dq_rest.layout)
    waits = barriers(1, 1), barriers(1, 2), barriers(1, 2)
    return BackwardTiles(
        queries, queries_rest, statistics, keys, keys_rest, waits[0], dscores, waits[1], waits[2], handed, halves_rest
    )


@gluon.jit
def load_tiles(q, k, v, lse, delta, dout, q_rest, k_rest, tiles, start, key, plane, kv_head, bounds, sizes):
    """Load the tile of keys and values, and all tiles of queries and dout with their statistics.

    The first query is at `start` in [B · T], the first key at `key` in [B · S] with SPLIT, or at `start`.
    """
    P: gl.constexpr = sizes.P
    V: gl.constexpr = sizes.V
    BYTES: gl.constexpr = 2 * (q.block_type.nbytes + lse.block_type.nbytes)
    REST_BYTES: gl.constexpr = q_rest.block_type.nbytes if sizes.REST > 0 else 0
    if bounds.count > 0:
        loaded = tiles.loaded.index(0)
        at = key if sizes.SPLIT else start
        mbarrier.expect(loaded, 2 * k.block_type.nbytes + (k_rest.block_type.nbytes if sizes.REST > 0 else 0))
        tma.async_copy_global_to_shared(k, [at, kv_head * sizes.H], loaded, tiles.keys.index(0))
        if sizes.REST > 0:
            tma.async_copy_global_to_shared(k_rest, [at, kv_head * sizes.H + V], loaded, tiles.keys_rest.index(0))
        tma.async_copy_global_to_shared(v, [at, kv_head * V], loaded, tiles.keys.index(1))
    for n in range(sizes.G // P * bounds.count):
        part, i = visited(n, bounds, sizes)
        token, head = start + i * (GROUP_ROWS // P), kv_head * sizes.G + part * P
        line = [plane + part, bounds.first * P + i * GROUP_ROWS]
        slot, full = vacate(tiles.queries, n, BYTES + REST_BYTES)
        tma.async_copy_global_to_shared(q, [token, head, 0], full, tiles.queries.tiles.index(2 * slot))
        if sizes.REST > 0:
            tma.async_copy_global_to_shared(q_rest, [token, head, V], full, tiles.queries_rest.index(slot))
        tma.async_copy_global_to_shared(lse, line, full, tiles.statistics.index(2 * slot))
        tma.async_copy_global_to_shared(dout, [token, head, 0], full, tiles.queries.tiles.index(2 * slot + 1))
        tma.async_copy_global_to_shared(delta, line, full, tiles.statistics.index(2 * slot + 1))
