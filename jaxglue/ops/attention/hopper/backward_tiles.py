"""Tiles of the backward kernel: places in shared memory, the range that a program visits, and their loads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from jaxglue.ops.attention.hopper.sums import visible_end
from jaxglue.ops.attention.hopper.tiles import Range
from jaxglue.ops.attention.hopper.visits import visited
from jaxglue.ops.tile_ring import GROUP_ROWS, Ring, barriers, ring, vacate


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
    return Range(first, full, gl.minimum(gl.maximum(cut, full), count), count)


@gluon.jit
def allocate(q, k, lse, dq, STAGES: gl.constexpr, P: gl.constexpr, H: gl.constexpr):
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
def load_tiles(q, k, v, lse, delta, dout, tiles, start, key, plane, kv_head, bounds, sizes):
    """Load the tile of keys and values, and all tiles of queries and dout with their statistics.

    The first query is at `start` in [B · T], the first key at `key` in [B · S] with SPLIT, or at `start`.
    """
    P: gl.constexpr = sizes.P
    BYTES: gl.constexpr = 2 * (q.block_type.nbytes + lse.block_type.nbytes)
    if bounds.count > 0:
        loaded = tiles.loaded.index(0)
        at = key if sizes.SPLIT else start
        mbarrier.expect(loaded, 2 * k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [at, kv_head * sizes.H], loaded, tiles.keys.index(0))
        tma.async_copy_global_to_shared(v, [at, kv_head * sizes.H], loaded, tiles.keys.index(1))
    for n in range(sizes.G // P * bounds.count):
        part, i = visited(n, bounds, sizes)
        rows = [start + i * (GROUP_ROWS // P), kv_head * sizes.G + part * P, 0]
        line = [plane + part, bounds.first * P + i * GROUP_ROWS]
        place, full = vacate(tiles.queries, n, BYTES)
        tma.async_copy_global_to_shared(q, rows, full, tiles.queries.tiles.index(2 * place))
        tma.async_copy_global_to_shared(lse, line, full, tiles.statistics.index(2 * place))
        tma.async_copy_global_to_shared(dout, rows, full, tiles.queries.tiles.index(2 * place + 1))
        tma.async_copy_global_to_shared(delta, line, full, tiles.statistics.index(2 * place + 1))
