"""Time of Hopper's attention kernels, whose programs differ in length and take turns on the multiprocessors.

Rows with few documents and few key/value heads have programs that end long after the mean one.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

_MULTIPROCESSORS = 132
_ROWS = 64
"""Rows of a warpgroup's matmul."""
_AT_ONCE = 33
"""Programs that `_last_end` places together."""


class TileRates(NamedTuple):
    """Speed of a kernel's programs."""

    share: float
    """Share of the matmul rate at which tiles are multiplied."""
    start: float
    """Seconds in which a program starts and ends."""
    moved: int = 0
    """Bytes moved beside it for each element of queries: products with the output, float32 sums and their rounding."""


_FORWARD = {64: TileRates(0.68, 4e-6), 128: TileRates(0.94, 3e-6)}
_BACKWARD = {64: TileRates(0.62, 6e-6, 8), 128: TileRates(0.83, 4e-6, 12)}
"""By head dim (benchmarks/results/attention_lengths.json, attention_hopper.json)."""
_PARTED = 0.94
"""Rate of the backward pass by that where a token's query heads fit a tile."""
_FORWARD_MATMULS, _BACKWARD_MATMULS = 2, 5


class Heads(NamedTuple):
    """Heads of an attention call."""

    queries: int
    keys: int
    dim: int

    @property
    def group(self) -> int:
        """Return the query heads of a key/value head."""
        return self.queries // self.keys

    @property
    def in_tile(self) -> int:
        """Return the query heads of a token that are in one tile: the largest power of two that divides the group."""
        return math.gcd(self.group, 16)


@lru_cache(maxsize=256)
def hopper_seconds(
    lengths: tuple[int, ...], heads: Heads, window: int | None, *, matmul: float, copy: float
) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass over documents of these lengths.

    Args:
        lengths: of the documents of one micro-batch, in order.
        heads: of the call.
        window: tokens visible to a query; None for all.
        matmul: FLOP/s of the GPU.
        copy: bytes/s of its memory.
    """
    size = 64 if heads.dim <= 64 else 128
    passes = (
        (forward_tiles(lengths, heads, window), _FORWARD[size], 2 * _FORWARD_MATMULS, 1.0),
        (backward_tiles(lengths, heads, window), _BACKWARD[size], _BACKWARD_MATMULS, _parted(heads)),
    )
    elements = sum(lengths) * heads.queries * heads.dim

    def seconds(tiles, rates: TileRates, matmuls: int, slower: float) -> float:
        flops = 2 * matmuls * _ROWS * 2 * _ROWS * heads.dim
        tile = flops * _MULTIPROCESSORS / (slower * rates.share * matmul)
        return _last_end(rates.start + tile * tiles) + rates.moved * elements / copy

    forward, backward = (seconds(*each) for each in passes)
    return forward, backward


def _parted(heads: Heads) -> float:
    return 1.0 if heads.in_tile == min(heads.group, 16) else _PARTED


def forward_tiles(lengths: Sequence[int], heads: Heads, window: int | None) -> Int[np.ndarray, " programs"]:
    """Count the tiles of 128 keys that each program of the forward kernel visits, in the order of their starts."""
    tokens = 2 * _ROWS // heads.in_tile
    ends = np.cumsum(lengths)
    first = np.arange(0, ends[-1], tokens)[::-1]
    begin = (ends - lengths)[np.searchsorted(ends, first, side="right")]
    if window is not None:
        begin = np.maximum(begin, first - window + 1)
    tiles = -(-(np.minimum(first + tokens, ends[-1]) - begin) // (2 * _ROWS))
    return np.tile(np.repeat(tiles, heads.group // heads.in_tile), heads.keys)


def backward_tiles(lengths: Sequence[int], heads: Heads, window: int | None) -> Int[np.ndarray, " programs"]:
    """Count the tiles of 64 query rows that each program of the backward kernel, of 128 keys, visits, in order."""
    ends = np.cumsum(lengths)
    first = np.arange(0, ends[-1], 2 * _ROWS)
    last = np.minimum(first + 2 * _ROWS, ends[-1]) - 1
    end = ends[np.searchsorted(ends, last, side="right")]
    if window is not None:
        end = np.minimum(end, last + window)
    parts = heads.group // heads.in_tile
    return np.tile(-(-(end - first) * heads.in_tile // _ROWS) * parts, heads.keys)


def _last_end(seconds: Float[np.ndarray, " programs"]) -> float:
    """Return when the last program ends, each of which starts in order on the first free multiprocessor."""
    free = np.zeros(_MULTIPROCESSORS)
    for at in range(0, len(seconds), _AT_ONCE):
        free.sort()
        some = seconds[at : at + _AT_ONCE]
        free[: len(some)] += some
    return float(free.max())
