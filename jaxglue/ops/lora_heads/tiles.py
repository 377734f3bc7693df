"""Tile sizes of the kernels."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeadTiles:
    """A program covers `heads` heads of block_m tokens, or with its gradient one of `rows`, block_m at a time."""

    block_m: int
    heads: int = 4
    rows: int = 512
    num_warps: int = 4
    num_stages: int = 2


ROTATE_TILES = HeadTiles(block_m=32)
GRADIENT_TILES = HeadTiles(block_m=32)
