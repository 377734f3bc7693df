"""Tile sizes of kernels that multiply by matrices of a few ranks, measured on an H200."""

from dataclasses import dataclass
from typing import Any

import triton

from jaxglue.ops.launch import dot_precision


@dataclass(frozen=True, kw_only=True)
class LoraTiles:
    """Rows and columns in a tile, and how its program is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class GradientTiles(LoraTiles):
    """A program reads `columns` of `block_m` rows, `block_n` at a time."""

    columns: int
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3


_SMALL = {"block_m": 128, "num_warps": 4}
_SIZES = (
    (GradientTiles(block_m=512, columns=1024), 128),
    (GradientTiles(block_m=512, columns=512), 128),
    (GradientTiles(**_SMALL, columns=512), 256),
    (GradientTiles(**_SMALL, columns=256), 0),
)
"""Tiles from large to small, each with the programs that it needs to fill an H200's 132 multiprocessors."""
PRODUCT_TILES = LoraTiles(block_m=64, block_n=128, num_warps=4, num_stages=1)


def fitting_tiles(M: int, N: int) -> GradientTiles:
    """Return the largest tiles of [M, N], with least to add up, that still fill every multiprocessor."""
    return next(
        tiles for tiles, programs in _SIZES if triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.columns) >= programs
    )


def block_constants(tiles: LoraTiles, rank: int, dtype) -> dict[str, Any]:
    """Return the kernels' block sizes, at least 16 ranks for `tl.dot`, and the precision of matmuls."""
    blocks = {"BLOCK_R": max(16, triton.next_power_of_2(rank)), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    return blocks | {"PRECISION": dot_precision(dtype)}
