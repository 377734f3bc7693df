"""Tiles that one warp loads through TMA for two warpgroups, in Gluon kernels for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

GROUP_ROWS = gl.constexpr(64)
"""Rows of a warpgroup's matmul."""


@aggregate
class Ring:
    """Places for tiles in shared memory, each filled by one warp and then read by two warpgroups, over and over."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        """Bundle the tiles with two barriers for each."""
        self.tiles, self.full, self.empty = tiles, full, empty


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers that ARRIVALS warpgroups, or a copy, complete."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(made.index(index), count=ARRIVALS)
    return made


@gluon.jit
def ring(tiles, PLACES: gl.constexpr):
    """Return a ring with so many places for tiles."""
    return Ring(tiles, barriers(PLACES, 1), barriers(PLACES, 2))


@gluon.jit
def turn(ring, n):
    """Return the place of the n-th tile, and the parity of its turn there."""
    PLACES: gl.constexpr = ring.full.shape[0]
    return n % PLACES, (n // PLACES) & 1


@gluon.jit
def vacate(ring, n, BYTES: gl.constexpr):
    """Wait until there is room for the n-th tile of so many bytes; return (place, barrier of its copies)."""
    slot, parity = turn(ring, n)
    mbarrier.wait(ring.empty.index(slot), parity ^ 1)
    mbarrier.expect(ring.full.index(slot), BYTES)
    return slot, ring.full.index(slot)


@gluon.jit
def load(ring, n, descriptor, coordinates):
    """Load the n-th tile."""
    slot, full = vacate(ring, n, descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, coordinates, full, ring.tiles.index(slot))


@gluon.jit
def await_place(ring, n):
    """Return the place of the n-th tile once it has come."""
    slot, parity = turn(ring, n)
    mbarrier.wait(ring.full.index(slot), parity)
    return slot


@gluon.jit
def await_tile(ring, n):
    """Return the n-th tile once it has come."""
    return ring.tiles.index(await_place(ring, n))


@gluon.jit
def release(ring, n):
    """Let the n-th tile be overwritten, once all its readers have."""
    mbarrier.arrive(ring.empty.index(turn(ring, n)[0]), count=1)
