"""Tile sizes of the kernels."""

from dataclasses import dataclass

from jaxglue.ops.lora.tiles import LoraTiles


@dataclass(frozen=True, kw_only=True)
class HeadTiles(LoraTiles):
    """A program covers block_m tokens of at most `heads` heads, one at a time."""

    heads: int
    block_n: int = 0
    num_warps: int = 4
    num_stages: int = 2


ROTATE_TILES = HeadTiles(block_m=64, heads=4)
GRADIENT_TILES = HeadTiles(block_m=32, heads=4)
