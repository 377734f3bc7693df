"""Tile sizes of the kernels, measured on an H200."""

from dataclasses import dataclass, replace

from jaxglue.ops.lora.tiles import LoraTiles


@dataclass(frozen=True, kw_only=True)
class RowTiles(LoraTiles):
    """SwiGLU's programs cover `length` columns forward and rows backward, others all."""

    block_m: int = 64
    block_n: int = 128
    length: int = 1024
    num_warps: int = 4
    num_stages: int = 3


EXTEND_TILES = RowTiles(num_warps=8)
CONTRACT_TILES = RowTiles(block_m=32)
SWIGLU_TILES = RowTiles(block_n=64)
SWIGLU_GRADIENT_TILES = RowTiles(block_n=64, length=512)
GRADIENT_TILES = RowTiles(num_stages=6)
WEIGHT_TILES = RowTiles(block_m=4, block_n=1024, num_warps=2, num_stages=1)


def shallow_tiles() -> dict[str, RowTiles]:
    """Return tiles, by field of `TritonSmallLayer`, for 99 KiB of shared memory."""
    tiles = {"extend": EXTEND_TILES, "contract": CONTRACT_TILES, "swiglu": SWIGLU_TILES, "gradient": GRADIENT_TILES}
    tiles |= {"swiglu_gradient": SWIGLU_GRADIENT_TILES, "weight": WEIGHT_TILES}
    shallow = {name: replace(tile, num_stages=min(tile.num_stages, 2)) for name, tile in tiles.items()}
    return {f"{name}_tiles": tile for name, tile in shallow.items()}
