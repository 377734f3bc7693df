"""Exponentials of logits, in Gluon: one warp loads tiles through TMA, and two warpgroups multiply 64 rows each.

A warpgroup may be some steps ahead of the other, whose matmuls then run under its exponentials.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxglue.ops.tile_ring import GROUP_ROWS, await_place, release, ring, vacate

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load_tiles(x, w, left, right, D: gl.constexpr, TILES_M: gl.constexpr, TILES: gl.constexpr,
                PROGRAMS: gl.constexpr):  # fmt: skip
    """Load the factors of all tiles of a program, right ones beside the places of the ring of left ones."""
    BYTES: gl.constexpr = x.block_type.nbytes + w.block_type.nbytes
    ROWS: gl.constexpr = x.block_type.shape[0]
    COLUMNS: gl.constexpr = w.block_type.shape[0]
    DEPTH: gl.constexpr = x.block_type.shape[1]
    n = 0
    for tile in range(gl.program_id(0), TILES, PROGRAMS):
        for k in range(0, D, DEPTH):
            slot, full = vacate(left, n, BYTES)
            tma.async_copy_global_to_shared(x, [tile % TILES_M * ROWS, k], full, left.tiles.index(slot))
            tma.async_copy_global_to_shared(w, [tile // TILES_M * COLUMNS, k], full, right.index(slot))
            n += 1


@gluon.jit
def _multiply(left, right, n, GROUP: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 64 rows of a tile of logits, from the n-th loaded factors on, and the number of the next ones."""
    DEPTH: gl.constexpr = left.tiles.shape[2]
    BN: gl.constexpr = right.shape[1]
    logits = gl.zeros([GROUP_ROWS, BN], gl.float32, layout=LAYOUT)
    for k in range(0, D, DEPTH):
        slot = await_place(left, n)
        rows = left.tiles.index(slot).slice(GROUP * GROUP_ROWS, GROUP_ROWS)
        logits = warpgroup_mma(rows, right.index(slot).permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(1, deps=[logits])
        if k > 0:
            release(left, n - 1)
        n += 1
    logits = warpgroup_mma_wait(0, deps=[logits])
    release(left, n - 1)
    return logits, n


@gluon.jit
def _store_part(numerators, part, buffer, row, column, M: gl.constexpr, WIDTH: gl.constexpr):
    """Store some columns of 64 rows through shared memory."""
    PART: gl.constexpr = buffer.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // PART, PART // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, WIDE))
    columns = column + gl.arange(0, PART, layout=gl.SliceLayout(0, WIDE))
    buffer.store(part.to(numerators.dtype.element_ty))
    gl.barrier()  # rows are read by other threads than wrote them
    mask = (rows < M)[:, None] & (columns < WIDTH)[None, :]
    gl.store(numerators + rows[:, None].to(gl.int64) * WIDTH + columns[None, :], buffer.load(WIDE), mask=mask)
    gl.barrier()  # the next part overwrites the buffer


@gluon.jit
def _exponentials(
    arrays, places, GROUP: gl.constexpr, M: gl.constexpr, V: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr,
    TILES_M: gl.constexpr, TILES_N: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of each tile of a program."""
    references, numerators, sums, tops = arrays
    left, right, staging = places
    BM: gl.constexpr = left.tiles.shape[1]
    BN: gl.constexpr = right.shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    lane = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LOGITS))
    columns = gl.arange(0, BN, layout=gl.SliceLayout(0, LOGITS))
    n = 0
    for tile in range(gl.program_id(0), TILES_M * TILES_N, PROGRAMS):
        row, column, part = tile % TILES_M * BM + GROUP * GROUP_ROWS, tile // TILES_M * BN, tile // TILES_M
        rows = row + lane
        reference = gl.load(references + rows, mask=rows < M, other=0.0)
        logits, n = _multiply(left, right, n, GROUP, D, LOGITS)
        differences = logits * LOG2_E - (reference * LOG2_E)[:, None]
        if part == TILES_N - 1:
            differences = gl.where((column + columns < V)[None, :], differences, -1e30)
        exponentials = gl.exp2(differences)
        gl.store(sums + rows * TILES_N + part, gl.sum(exponentials, 1), mask=rows < M)
        gl.store(tops + rows * TILES_N + part, gl.max(differences, 1) / LOG2_E, mask=rows < M)
        first, second = exponentials.reshape([GROUP_ROWS, 2, BN // 2]).permute((0, 2, 1)).split()
        _store_part(numerators, first, staging.index(GROUP), row, column, M, WIDTH)
        _store_part(numerators, second, staging.index(GROUP), row, column + BN // 2, M, WIDTH)


@gluon.jit
def exponentials_kernel(
    x, w, references, numerators, sums, tops, M: gl.constexpr, V: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute numerators [M, WIDTH] = exp(x·wᵀ - references) without writing logits, 0 from the V-th column on.

    x and w describe tiles of [M, D] and [WIDTH, D]. Also compute sums and the largest differences of a tile's columns,
    both [M, tiles]. Grid (PROGRAMS), each for many.
    """
    BM: gl.constexpr = x.block_type.shape[0]
    BN: gl.constexpr = w.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    TILES_M: gl.constexpr = (M + BM - 1) // BM
    TILES_N: gl.constexpr = (V + BN - 1) // BN
    left = ring(gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout), STAGES)
    right = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    STAGING: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    staging = gl.allocate_shared_memory(x.dtype, [2, GROUP_ROWS, BN // 2], STAGING)
    # Barriers were initialized by one thread, and TMA, which signals them, sees shared memory after a fence alone.
    fence_async_shared()
    gl.barrier()
    arrays, places = (references, numerators, sums, tops), (left, right, staging)
    gl.warp_specialize(
        [
            (_exponentials, (arrays, places, 0, M, V, WIDTH, D, TILES_M, TILES_N, PROGRAMS)),
            (_exponentials, (arrays, places, 1, M, V, WIDTH, D, TILES_M, TILES_N, PROGRAMS)),
            (_load_tiles, (x, w, left, right, D, TILES_M, TILES_M * TILES_N, PROGRAMS)),
        ],
        [4, 1],
        [240, 24],
    )
