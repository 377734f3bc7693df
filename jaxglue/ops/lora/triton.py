"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.launch import Launcher
from jaxglue.ops.lora import kernels
from jaxglue.ops.lora.blocks import Blocks, block_constants


@dataclass(frozen=True, kw_only=True)
class Tiles(Blocks):
    """What a program reads: `columns` of `block_m` rows, `block_n` at a time."""

    columns: int
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3


_SMALL = {"block_m": 128, "num_warps": 4}
_SIZES = (
    (Tiles(block_m=512, columns=1024), 128),
    (Tiles(block_m=512, columns=512), 128),
    (Tiles(**_SMALL, columns=512), 256),
    (Tiles(**_SMALL, columns=256), 0),
)
"""Tiles from large to small, and the programs that they want: an H200 has 132 multiprocessors."""
_PRODUCT_TILES = Blocks(block_m=64, block_n=128, num_warps=4, num_stages=1)


def fitting_tiles(M: int, N: int) -> Tiles:
    """The largest tiles of [M, N], which leave least to add up, of which there are enough for every multiprocessor."""
    return next(
        tiles for tiles, programs in _SIZES if triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.columns) >= programs
    )


@dataclass(frozen=True, kw_only=True)
class TritonLowRank(Launcher):
    """`LowRankBackend` by our own kernels."""

    tiles: Tiles | None = None
    """Of the gradients; None for those that fit."""
    product_tiles: Blocks = _PRODUCT_TILES

    def product(self, hidden, matrix, first: int):
        """See `LowRankBackend`."""
        (M, stride), (N, R), tiles = hidden.shape, matrix.shape, self.product_tiles
        grid = triton.cdiv(N, tiles.block_n), triton.cdiv(M, tiles.block_m)
        sizes = {"M": M, "N": N, "R": R, "STRIDE": stride, "FIRST": first}
        constants = sizes | block_constants(tiles, R, hidden.dtype)
        out_type = (jax.ShapeDtypeStruct((M, N), hidden.dtype),)
        compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "flops": 2 * M * N * R}
        return self._launch(kernels.product_kernel, (hidden, matrix), out_type, grid, constants, **compiled)[0]

    def gradients(self, dy, matrix, hidden, first: int):
        """See `LowRankBackend`."""
        (M, N), R = dy.shape, matrix.shape[1]
        tiles = self.tiles or fitting_tiles(M, N)
        grid = triton.cdiv(M, tiles.block_m), triton.cdiv(N, tiles.columns)
        out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((grid[1], M, R), (grid[0], N, R)))
        sizes = {"M": M, "N": N, "R": R, "STRIDE": hidden.shape[1], "FIRST": first}
        constants = sizes | block_constants(tiles, R, dy.dtype) | {"COLUMNS": tiles.columns}
        arrays = (dy, matrix, hidden)
        compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "flops": 4 * M * N * R}
        dhidden, dmatrix = self._launch(kernels.gradients_kernel, arrays, out_type, grid, constants, **compiled)
        return dhidden.sum(axis=0).astype(dy.dtype), dmatrix.sum(axis=0)
