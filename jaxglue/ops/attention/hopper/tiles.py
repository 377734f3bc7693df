"""Parts that the Gluon kernels of both passes share: sizes, ranges of loops, rows of a warpgroup."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from jaxglue.ops.tile_ring import GROUP_ROWS


@aggregate
class AttentionSizes:
    """Constants of a call: T queries, S keys, K key/value heads, G query heads each, P of them in a tile, head dim H.

    With SPLIT, queries are some of a row's tokens (see `forward_kernel`, `backward_kernel`). CHUNK is of the backward
    pass (see `visits`), SOFTCAP, or None, of the forward pass. V is the head dim of values, and REST = H − V the
    columns of queries and keys beside as many as values have, whose tiles are apart.
    """

    T: gl.constexpr
    S: gl.constexpr
    K: gl.constexpr
    G: gl.constexpr
    P: gl.constexpr
    H: gl.constexpr
    WINDOW: gl.constexpr
    SCALE: gl.constexpr
    CHUNK: gl.constexpr
    SOFTCAP: gl.constexpr
    SPLIT: gl.constexpr
    V: gl.constexpr
    REST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, T, S, K, G, P, H, WINDOW, SCALE, SPLIT, V, CHUNK=1, SOFTCAP=None):
        """Bundle the constants."""
        self.T, self.S, self.SPLIT = gl.constexpr(T), gl.constexpr(S), gl.constexpr(SPLIT)
        self.K, self.G, self.P = gl.constexpr(K), gl.constexpr(G), gl.constexpr(P)
        self.H, self.WINDOW, self.SCALE = gl.constexpr(H), gl.constexpr(WINDOW), gl.constexpr(SCALE)
        self.CHUNK, self.SOFTCAP = gl.constexpr(CHUNK), gl.constexpr(SOFTCAP)
        self.V, self.REST = gl.constexpr(V), gl.constexpr(H - V)


@aggregate
class TileRange:
    """A loop over tiles: `count` of them from token `first` on, only those in [full, cut) without a mask."""

    first: gl.tensor
    full: gl.tensor
    cut: gl.tensor
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, full, cut, count):
        """Bundle the bounds."""
        self.first, self.full, self.cut, self.count = first, full, cut, count


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
    base, offsets, mask = rows(row, token, head, T, HEADS, H, P, tile.shape[1])
    tile.store(value.to(target.dtype.element_ty))
    gl.barrier()  # rows are read by other threads than wrote them
    gl.store(target + base + offsets, tile.load(offsets.type.layout), mask=mask)
    gl.barrier()  # the next rows overwrite the tile


@gluon.jit
def load_rows(source, tile, row, token, head, T: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, P: gl.constexpr):
    """Load `rows` to shared memory; zeros past the row."""
    base, offsets, mask = rows(row, token, head, T, HEADS, H, P, tile.shape[1])
    tile.store(gl.load(source + base + offsets, mask=mask, other=0.0))
