"""Parts that the Gluon kernels of both passes share: sizes, and tiles that one warp loads for two warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

GROUP_ROWS = gl.constexpr(64)
"""Rows of a warpgroup's matmul."""


@aggregate
class Sizes:
    """Constants of a call: T tokens, K key/value heads with G query heads each, P of them in a tile, head dim H."""

    T: gl.constexpr
    K: gl.constexpr
    G: gl.constexpr
    P: gl.constexpr
    H: gl.constexpr
    WINDOW: gl.constexpr
    SCALE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, T, K, G, P, H, WINDOW, SCALE):
        """Bundle the constants."""
        self.T, self.K, self.G, self.P = gl.constexpr(T), gl.constexpr(K), gl.constexpr(G), gl.constexpr(P)
        self.H, self.WINDOW, self.SCALE = gl.constexpr(H), gl.constexpr(WINDOW), gl.constexpr(SCALE)


@aggregate
class Range:
    """A loop over tiles: `count` of them from token `first` on, only those in [full, cut) without a mask."""

    first: gl.tensor
    full: gl.tensor
    cut: gl.tensor
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, full, cut, count):
        """Bundle the bounds."""
        self.first, self.full, self.cut, self.count = first, full, cut, count


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
    place, parity = turn(ring, n)
    mbarrier.wait(ring.empty.index(place), parity ^ 1)
    mbarrier.expect(ring.full.index(place), BYTES)
    return place, ring.full.index(place)


@gluon.jit
def load(ring, n, descriptor, coordinates):
    """Load the n-th tile."""
    place, full = vacate(ring, n, descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, coordinates, full, ring.tiles.index(place))


@gluon.jit
def await_place(ring, n):
    """Return the place of the n-th tile once it has come."""
    place, parity = turn(ring, n)
    mbarrier.wait(ring.full.index(place), parity)
    return place


@gluon.jit
def await_tile(ring, n):
    """Return the n-th tile once it has come."""
    return ring.tiles.index(await_place(ring, n))


@gluon.jit
def release(ring, n):
    """Let the n-th tile be overwritten, once all its readers have."""
    mbarrier.arrive(ring.empty.index(turn(ring, n)[0]), count=1)


@gluon.jit
def rows(row, token, head, T: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, P: gl.constexpr, WIDTH: gl.constexpr):
    """Return (base, offsets, mask) of 64 rows: P heads of each token, from a token and head of [B, T, HEADS, H] on.

    They are the first WIDTH of their H columns.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    lane = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))
    offsets = ((lane // P) * (HEADS * H) + (lane % P) * H)[:, None] + column[None, :]
    base = ((row * T + token) * HEADS + head) * H
    return base, offsets, (token + lane // P < T)[:, None]


@gluon.jit
def store_rows(target, value, tile, row, token, head, T: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr,
               P: gl.constexpr):  # fmt: skip
    """Store `rows`, through a tile in shared memory that a warpgroup no longer needs."""
    base, offsets, mask = rows(row, token, head, T, HEADS, H, P, H)
    tile.store(value.to(target.dtype.element_ty))
    gl.barrier()
    gl.store(target + base + offsets, tile.load(offsets.type.layout), mask=mask)
    gl.barrier()


@gluon.jit
def load_rows(source, tile, row, token, head, T: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, P: gl.constexpr):
    """Load `rows` to shared memory; zeros past the row."""
    base, offsets, mask = rows(row, token, head, T, HEADS, H, P, H)
    tile.store(gl.load(source + base + offsets, mask=mask, other=0.0))
