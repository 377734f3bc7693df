"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
from jax_triton.triton_lib import TensorDescriptor
from jaxtyping import Array, Float
from triton.experimental.gluon.language import NVMMASharedLayout

from jaxglue.ops.cross_entropy import hopper, kernels
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.quant.fp8 import E4M3
from jaxglue.ops.tile_ring import GROUP_ROWS

LARGEST_DEPTH = 2048
"""Columns of hidden states up to which exponentials are formed where logits are multiplied; measured at 1,024."""
_BEYOND = 1e30
"""Reference of a token that does not count: its exponentials are 0."""


@dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """Rows, columns and depth of a tile of logits, depths loaded ahead, and persistent programs."""

    block_m: int = 2 * GROUP_ROWS.value
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    programs: int = 132


@dataclass(frozen=True, kw_only=True)
class TritonCrossEntropy(Launcher):
    """`CrossEntropy` by our own kernels."""

    block: int = 4096
    """Logits in a step of a program."""
    num_warps: int = 8
    product_tiles: ProductTiles = ProductTiles()
    """For an H200."""
    softcap: float | None = None
    """Bound of the logits, which functions get before it; `scaled` and `product_gradient` know none."""
    vocab_size: int | None = None
    """Logits of a row that count, the first ones; None for all."""

    def multiplies(self, x, w) -> bool:
        """Return whether `product_gradient` serves, rather than cuBLAS and a pass over logits."""
        fits = x.dtype == jnp.bfloat16 and x.shape[1] % 8 == 0 and self.softcap is None
        return self.compute_capability == 90 and fits and x.shape[1] <= LARGEST_DEPTH

    def __call__(self, logits, targets, weights, dtype):
        """See `CrossEntropy`."""
        M, V = logits.shape
        out_type = jax.ShapeDtypeStruct((M,), jnp.float32), jax.ShapeDtypeStruct((M, V), dtype)
        moved = M * V * (2 * logits.dtype.itemsize + jnp.dtype(dtype).itemsize)  # logits are read twice
        arrays, constants = (logits, targets, weights), {"SOFTCAP": self.softcap}
        return self._call(kernels.cross_entropy_kernel, arrays, out_type, moved=moved, constants=constants)

    def softmax_gradient(self, logits, targets, weights, dtype):
        """See `SoftmaxGradient`."""
        M, V = logits.shape
        per_row = jax.ShapeDtypeStruct((M,), jnp.float32)
        out_type = per_row, jax.ShapeDtypeStruct((M, V), dtype), per_row
        arrays, constants = (logits, targets, weights), {"SOFTCAP": self.softcap}
        return self._call(kernels.softmax_gradient_kernel, arrays, out_type, num_warps=16, constants=constants)

    def product_gradient(self, x, w, targets, weights):
        """See `ProductGradient`."""
        target_rows = w[targets].astype(jnp.float32)
        target_logits = jnp.sum(x.astype(jnp.float32) * target_rows, axis=1)
        references = jnp.where(weights != 0, target_logits, _BEYOND)
        numerators, sums, tops = self._exponentials(x, w, references)
        losses, factors, numerators = self._losses(x, w, references, sums, tops, weights, numerators)
        products = jnp.matmul(numerators, w, preferred_element_type=jnp.float32)
        return losses, products * factors[:, None] - weights[:, None] * target_rows

    def _exponentials(self, x, w, references) -> tuple[Array, Array, Array]:
        """Return exp(x·wᵀ − references), and the sums and largest differences of each tile's columns."""
        (M, D), tiles = x.shape, self.product_tiles
        V, width = self.vocab_size or len(w), len(w)
        count = triton.cdiv(V, tiles.block_n)
        partial = jax.ShapeDtypeStruct((M, count), jnp.float32)
        out_type = jax.ShapeDtypeStruct((M, width), x.dtype), partial, partial
        programs = min(tiles.programs, triton.cdiv(M, tiles.block_m) * count)
        sizes = {"M": M, "V": V, "WIDTH": width, "D": D, "PROGRAMS": programs, "STAGES": tiles.num_stages}
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * M * V * D)
        arrays = self._tiled(x, tiles.block_m), self._tiled(w, tiles.block_n), references
        return self._launch(hopper.exponentials_kernel, arrays, out_type, (programs,), sizes, cost=cost)

    def _losses(self, x, w, references, sums, tops, weights, numerators) -> tuple[Array, Array, Array]:
        """Return (losses, factors, numerators), with rows of too large exponentials computed again."""
        (M, D), (width, tiles) = x.shape, (len(w), sums.shape[1])
        refs = [jax.new_ref(array) for array in (numerators, *(jax.lax.empty((M,), jnp.float32) for _ in range(2)))]
        constants = {"V": self.vocab_size or width, "WIDTH": width, "D": D}
        constants |= {"TILES": tiles, "BLOCK_TILES": triton.next_power_of_2(tiles)}
        constants |= {"BLOCK": 64, "BLOCK_D": min(128, triton.next_power_of_2(D))}
        arrays = x, w, references, sums, tops, weights, *refs
        cost = KernelCost(kind=KernelKind.ROWS, bytes=2 * sums.size * 4)  # rows computed again are few
        self._launch(kernels.exponentials_loss_kernel, arrays, (), (M,), constants, cost=cost)
        numerators, losses, factors = map(jax.freeze, refs)
        return losses, factors, numerators

    def _tiled(self, x: Float[Array, "rows D"], rows: int) -> TensorDescriptor:
        layout = NVMMASharedLayout(128, 8 * x.dtype.itemsize, rank=2)
        return TensorDescriptor.from_array(x, (rows, self.product_tiles.block_k), layout)

    def scaled(self, products, row_scales, column_scales, targets, weights):
        """See `reference_scaled_cross_entropy`."""
        M, V = products.shape
        per_row = jax.ShapeDtypeStruct((M,), jnp.float32)
        arrays = products, row_scales.reshape(M), column_scales, targets, weights
        out_type = per_row, jax.ShapeDtypeStruct((M, V), E4M3), per_row
        losses, values, scales = self._call(kernels.scaled_cross_entropy_kernel, arrays, out_type)
        return losses, values, scales[:, None]

    def _call(
        self,
        kernel,
        arrays,
        out_type,
        num_warps: int | None = None,
        moved: int | None = None,
        constants: dict | None = None,
    ):
        M, width = arrays[0].shape
        sizes, warps = {"V": self.vocab_size or width, "WIDTH": width, "BLOCK": self.block}, num_warps or self.num_warps
        cost = KernelCost(kind=KernelKind.ROWS, bytes=moved)
        constants = sizes | (constants or {})
        return self._launch(kernel, arrays, out_type, (M,), constants, num_warps=warps, num_stages=2, cost=cost)
