"""Tile sizes of the kernels, measured on an H200."""

from dataclasses import dataclass, fields, replace

from jaxglue.ops.projection.tiles import LoraTiles


@dataclass(frozen=True, kw_only=True)
class RowTiles(LoraTiles):
    """SwiGLU's programs cover `length` columns forward; those of ranks add up block_n partial sums at once."""

    block_m: int = 64
    block_n: int = 128
    length: int = 1024
    num_warps: int = 4
    num_stages: int = 3


EXTEND_TILES = RowTiles(num_warps=8)
ADD_NORM_TILES = RowTiles(block_m=16, block_n=256, num_stages=2)
MIDDLE_TILES = RowTiles(num_warps=8)
ENTERED_TILES = RowTiles(num_warps=8)
SWIGLU_TILES = RowTiles(block_n=64)
SWIGLU_GRADIENT_TILES = RowTiles(block_n=64)
RANKS_TILES = RowTiles(block_m=32, block_n=4, num_stages=6)
GRADIENT_TILES = RowTiles(num_stages=6)
WEIGHT_TILES = RowTiles(block_m=4, block_n=1024, num_warps=2, num_stages=1)

_PROGRAMS = 264
"""Programs of SwiGLU's backward kernel that an H200 runs at a time."""


def even_length(rows: int, blocks: int, block_m: int) -> int:
    """Return the rows of a program of a block of columns, of `blocks`, so that the last programs are not few."""

    def length(waves: int) -> int:
        parts = max(_PROGRAMS * waves // blocks, 1)
        return -(-rows // (parts * block_m)) * block_m

    waves = min((1, 2, 3), key=lambda waves: waves * (length(waves) + block_m))
    return length(waves)


def shallow_tiles(kernels: type) -> dict[str, RowTiles]:
    """Return the tiles of a class of kernels, by field, for 99 KiB of shared memory."""
    tiles = {field.name: field.default for field in fields(kernels) if isinstance(field.default, RowTiles)}
    low = tiles | dict.fromkeys(("middle_tiles", "entered_tiles"), RowTiles(block_m=32))
    return {name: replace(each, num_stages=min(each.num_stages, 2)) for name, each in low.items()}
