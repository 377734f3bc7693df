"""Tile sizes of the kernels, measured on an H200."""

from dataclasses import dataclass

from jaxglue.ops.projection.tiles import LoraTiles


@dataclass(frozen=True, kw_only=True)
class LoraSwigluTiles(LoraTiles):
    """A program covers `length` columns forward, or rows backward, in tiles of block_m rows and block_n columns."""

    block_m: int = 64
    block_n: int = 64
    length: int
    num_warps: int = 4
    num_stages: int = 3


FORWARD_TILES = LoraSwigluTiles(length=1024)
SCALED_FORWARD_TILES = LoraSwigluTiles(block_n=32, length=1024)
BACKWARD_TILES = LoraSwigluTiles(block_m=32, length=1024)
