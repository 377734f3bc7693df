"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.kernel_cost import KernelCost, KernelKind, turns
from jaxglue.ops.launch import Launcher
from jaxglue.ops.projection import kernels
from jaxglue.ops.projection.lora import Quantizer, ScaledProduct
from jaxglue.ops.projection.tiles import PRODUCT_TILES, GradientTiles, LoraTiles, block_constants, fitting_tiles
from jaxglue.ops.quant.fp8 import E4M3


@dataclass(frozen=True, kw_only=True)
class TritonLora(Launcher):
    """`LoraBackend` by our own kernels."""

    gradient_tiles: GradientTiles | None = None
    """Tiles; None takes `fitting_tiles`."""
    product_tiles: LoraTiles = PRODUCT_TILES

    def product(self, hidden, matrix, first: int, base: ScaledProduct | None = None, addend=None):
        """See `LoraBackend`."""
        product, rows, columns = base or (None, None, None)
        return self._product(hidden, matrix, first, product, rows, columns, addend)

    def add_product(self, x, y, hidden, matrix):
        """See `LoraBackend`."""
        return self._product(hidden, matrix, base=y, addend=x)

    def _product(self, hidden, matrix, first: int = 0, base=None, rows=None, columns=None, addend=None):
        """Return hidden[:, first : first + R]·matrixᵀ (+ base (· rows) (· columns)) (+ addend)."""
        (M, stride), (N, R), tiles = hidden.shape, matrix.shape, self.product_tiles
        grid = triton.cdiv(N, tiles.block_n), triton.cdiv(M, tiles.block_m)
        sizes = {"M": M, "N": N, "R": R, "STRIDE": stride, "FIRST": first}
        further = {"HAS_BASE": base, "HAS_ROWS": rows, "HAS_COLUMNS": columns, "HAS_ADDEND": addend}
        constants = sizes | block_constants(tiles, R, hidden.dtype)
        constants |= {name: array is not None for name, array in further.items()}
        arrays = hidden, matrix, *(hidden if array is None else array for array in further.values())  # unused: not read
        out_type = (jax.ShapeDtypeStruct((M, N), hidden.dtype),)
        compiled, cost = (tiles.num_warps, tiles.num_stages), KernelCost(kind=KernelKind.ROWS, flops=2 * M * N * R)
        return self._launch(kernels.product_kernel, arrays, out_type, grid, constants, *compiled, cost=cost)[0]

    def gradients(self, dy, matrix, hidden, first: int, quantizer: Quantizer | None = None):
        """See `LoraBackend`."""
        (M, N), R = dy.shape, matrix.shape[1]
        tiles = self.gradient_tiles or fitting_tiles(M, N)
        grid = triton.cdiv(M, tiles.block_m), triton.cdiv(N, tiles.columns)
        sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((grid[1], M, R), (grid[0], N, R))]
        # FP8 arrays, even unused ones, do not compile before compute capability 8.9.
        codes = jax.ShapeDtypeStruct((M, N), E4M3) if quantizer else jax.ShapeDtypeStruct((1,), dy.dtype)
        sizes = {"M": M, "N": N, "R": R, "STRIDE": hidden.shape[1], "FIRST": first}
        constants = sizes | block_constants(tiles, R, dy.dtype)
        constants |= {"COLUMNS": tiles.columns, "QUANTIZE": quantizer is not None}
        arrays = dy, matrix, hidden, *(quantizer or (hidden, hidden))
        compiled, passed = (tiles.num_warps, tiles.num_stages), turns(min(tiles.columns, N), tiles.block_n)
        cost = KernelCost(kind=KernelKind.ADAPTER_GRADIENTS, flops=4 * M * N * R, turns=passed)
        dhidden, dmatrix, codes = self._launch(
            kernels.gradients_kernel, arrays, (*sums, codes), grid, constants, *compiled, cost=cost
        )
        return dhidden.sum(axis=0).astype(dy.dtype), dmatrix.sum(axis=0), codes if quantizer else None
