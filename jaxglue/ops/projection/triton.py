"""Launches of the kernels in `kernels.py`, and their tile sizes, measured on an H200."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.kernel_cost import KernelCost, KernelKind, turns
from jaxglue.ops.launch import Launcher, dot_precision
from jaxglue.ops.projection import kernels
from jaxglue.ops.quant.fp8 import E4M3, Quantizer, ScaledProduct


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
_ENCODE_VALUES = 1024
"""Values of a row per warp."""
_ENCODE_ROWS = 4
"""Rows of a program that reads factors of columns too."""


def fitting_tiles(M: int, N: int) -> GradientTiles:
    """Return the largest tiles of [M, N], with least to add up, that still fill every multiprocessor."""
    return next(
        tiles for tiles, programs in _SIZES if triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.columns) >= programs
    )


def rank_lanes(ranks: int) -> int:
    """Return a kernel's lanes for so many ranks, at least 16 for `tl.dot`."""
    return max(16, triton.next_power_of_2(ranks))


def block_constants(tiles: LoraTiles, rank: int, dtype) -> dict[str, Any]:
    """Return the kernels' block sizes and the precision of matmuls."""
    blocks = {"BLOCK_R": rank_lanes(rank), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    return blocks | {"PRECISION": dot_precision(dtype)}


@dataclass(frozen=True, kw_only=True)
class TritonLora(Launcher):
    """`LoraBackend` by our own kernels."""

    gradient_tiles: GradientTiles | None = None
    """Tiles; None takes `fitting_tiles`."""
    product_tiles: LoraTiles = PRODUCT_TILES

    def product(self, low_rank, matrix, first: int, base: ScaledProduct | None = None, addend=None):
        """See `LoraBackend`."""
        product, rows, columns = base or (None, None, None)
        return self._product(low_rank, matrix, first, product, rows, columns, addend)

    def add_product(self, x, y, low_rank, matrix):
        """See `LoraBackend`."""
        return self._product(low_rank, matrix, 0, y, None, None, x)

    def _product(self, low_rank, matrix, first: int, base, rows, columns, addend):
        """Return low_rank[:, first : first + R]·matrixᵀ (+ base (· rows) (· columns)) (+ addend)."""
        (M, stride), (N, R), tiles = low_rank.shape, matrix.shape, self.product_tiles
        grid = triton.cdiv(N, tiles.block_n), triton.cdiv(M, tiles.block_m)
        sizes = {"M": M, "N": N, "R": R, "STRIDE": stride, "FIRST": first}
        constants = sizes | block_constants(tiles, R, low_rank.dtype)
        arrays, out_type = (low_rank, matrix, base, rows, columns, addend), jax.ShapeDtypeStruct((M, N), low_rank.dtype)
        compiled, cost = (tiles.num_warps, tiles.num_stages), KernelCost(kind=KernelKind.ROWS, flops=2 * M * N * R)
        return self._launch(kernels.product_kernel, arrays, (out_type,), grid, constants, *compiled, cost=cost)[0]

    def sums(self, products, low_rank, matrices, factors, stream=None):
        """See `LoraBackend`."""
        (M, stride), R, tiles = low_rank.shape, matrices[0].shape[1], self.product_tiles
        widths = tuple(product.shape[1] for product in products)
        *firsts, programs = itertools.accumulate((triton.cdiv(N, tiles.block_n) for N in widths), initial=0)
        sizes: dict[str, Any] = {"M": M, "R": R, "stride": stride, "precision": dot_precision(low_rank.dtype)}
        sizes |= {"block_m": tiles.block_m, "block_n": tiles.block_n, "block_r": rank_lanes(R)}
        spec = kernels.SumsSpec(widths=widths, firsts=tuple(firsts), factors=tuple(factors), **sizes)
        outs = tuple(jax.new_ref(jax.lax.empty((M, N), low_rank.dtype)) for N in widths)
        arrays, grid = (
            (low_rank, tuple(matrices), tuple(products), stream, outs),
            (programs, triton.cdiv(M, tiles.block_m)),
        )
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * M * sum(widths) * R)
        compiled = tiles.num_warps, tiles.num_stages
        self._launch(kernels.sums_kernel, arrays, (), grid, {"spec": spec}, *compiled, cost=cost)
        return [jax.freeze(out) for out in outs]

    def gradients(self, dy, matrix, low_rank, first: int, quantizer: Quantizer | None = None):
        """See `LoraBackend`."""
        (M, N), R = dy.shape, matrix.shape[1]
        tiles = self.gradient_tiles or fitting_tiles(M, N)
        grid = triton.cdiv(M, tiles.block_m), triton.cdiv(N, tiles.columns)
        out_type = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((grid[1], M, R), (grid[0], N, R))]
        sizes = {"M": M, "N": N, "R": R, "STRIDE": low_rank.shape[1], "FIRST": first, "COLUMNS": tiles.columns}
        constants = sizes | block_constants(tiles, R, dy.dtype)
        if quantizer is None:
            constants["fp8_values"] = None
        else:
            out_type.append(jax.ShapeDtypeStruct((M, N), E4M3))
        # As tensor cores read it: so it is copied to shared memory while other columns are used.
        arrays = dy, matrix.astype(dy.dtype), low_rank, *(quantizer or (None, None))
        compiled, passed = (tiles.num_warps, tiles.num_stages), turns(min(tiles.columns, N), tiles.block_n)
        cost = KernelCost(kind=KernelKind.ADAPTER_GRADIENTS, flops=4 * M * N * R, turns=passed)
        dlow_rank, dmatrix, *fp8_values = self._launch(
            kernels.gradients_kernel, arrays, tuple(out_type), grid, constants, *compiled, cost=cost
        )
        return dlow_rank.sum(axis=0).astype(dy.dtype), dmatrix.sum(axis=0), fp8_values[0] if fp8_values else None


@dataclass(frozen=True, kw_only=True)
class TritonEncode(Launcher):
    """`encode` by our own kernel."""

    def encode(self, x, columns, scales):
        """See `jaxglue.ops.projection.fp8.encode`."""
        rows = x.reshape(-1, x.shape[-1])
        M, D = rows.shape
        block = triton.next_power_of_2(D)
        out_type = jax.ShapeDtypeStruct((M, D), E4M3), jax.ShapeDtypeStruct((M,), jnp.float32)
        arrays = rows, columns, None if scales is None else scales.reshape(M)
        constants = {"M": M, "D": D, "ROWS": 1 if columns is None else _ENCODE_ROWS, "BLOCK": block}
        grid, warps = (triton.cdiv(M, constants["ROWS"]),), min(max(block // _ENCODE_VALUES, 1), 16)
        cost = KernelCost(kind=KernelKind.ROWS)
        fp8_values, scales = self._launch(kernels.encode_kernel, arrays, out_type, grid, constants, warps, cost=cost)
        return fp8_values.reshape(x.shape), scales.reshape(*x.shape[:-1], 1)
