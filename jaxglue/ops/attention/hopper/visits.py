"""The order in which a program of the backward pass visits the tiles of queries that see its keys.

Programs of neighboring keys run side by side, and share most of what they read through the L2 cache if they come to it
at nearly the same time. In a document without a window all begin at its end, and visit a tile's heads one after
another. In a window each begins 2 · GROUP_ROWS tokens after the one before, and so reads tiles of one head some steps
later, but those of all heads so many steps later that the cache has lost them. There a program visits a chunk of one
head's tiles before the next head's. At a document's end programs are of different lengths, and each waits for the one
before it to come to its heads' turn; so chunks are short where documents are not much longer than the window.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LONGEST_CHUNK = 64
_PAIRS_OF_CHUNK = 1 << 21
"""Visible pairs in a document's whole windows for each tile of a chunk."""


def tiles_in_chunk(document: int, window: int | None) -> int:
    """Return the tiles of a head in a chunk, 1 without chunks, for documents of so many tokens."""
    pairs = 0 if window is None else (document - window) * window
    return min(max(pairs // _PAIRS_OF_CHUNK, 1), _LONGEST_CHUNK)


@gluon.jit
def visited(n, bounds, sizes):
    """Return (part of the heads, tile) that is visited n-th: masked tiles, those without a mask, masked ones."""
    PARTS: gl.constexpr = sizes.G // sizes.P
    late, early = bounds.count - bounds.cut, bounds.count - bounds.full
    begin = gl.where(n < late * PARTS, 0, gl.where(n < early * PARTS, late, early))
    end = gl.where(n < late * PARTS, late, gl.where(n < early * PARTS, early, bounds.count))
    return visited_between(n, begin, end, bounds, sizes)


@gluon.jit
def visited_between(n, begin, end, bounds, sizes):
    """Return (part, tile) that is visited n-th, one of those from `begin` to `end`, counted from the last tile."""
    PARTS: gl.constexpr = sizes.G // sizes.P
    if sizes.CHUNK > 1:
        first = begin + (n - begin * PARTS) // (sizes.CHUNK * PARTS) * sizes.CHUNK
        length = gl.minimum(sizes.CHUNK, end - first)
        n -= first * PARTS
        return n // length, bounds.count - 1 - first - n % length
    else:
        return n % PARTS, bounds.count - 1 - n // PARTS
