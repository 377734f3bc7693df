"""Launches of `served_kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jaxtyping import Array, Float

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.projection.served_kernels import merge_kernel
from jaxglue.ops.projection.triton import rank_lanes
from jaxglue.ops.quant.nf4 import VALUES
from jaxglue.ops.quant.served import Served, ServedNF4

_TILE = (64, 128)
"""Rows and columns of a program."""


@dataclass(frozen=True, kw_only=True)
class TritonMerge(Launcher):
    """`MergeBackend` in Triton."""

    precision: str = "tf32"
    """Of the product of the adapter's matrices."""

    def merge(self, weight: Served, A: Float[Array, "R in"], up: Float[Array, "out R"], dtype) -> Array:
        """See `MergeBackend`."""
        (rows, columns), (step, low, top), (block_n, block_k) = weight.shape, weight.levels, _TILE
        table = np.array(VALUES if isinstance(weight, ServedNF4) else (0.0,), np.float32)
        constants = {
            "OUT": rows,
            "IN": columns,
            "R": len(A),
            "SHARED": weight.block,
            "VALUES": len(table) if len(table) > 1 else 0,
            "LEVELS": low is not None,
            "BLOCK_R": rank_lanes(len(A)),
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "PRECISION": self.precision,
        }
        arrays = weight.matrix, A, up, step, step if low is None else low, step if top is None else top
        out_type = jax.ShapeDtypeStruct(weight.shape, dtype)
        grid = triton.cdiv(rows, block_n), triton.cdiv(columns, block_k)
        cost = KernelCost(kind=KernelKind.ROWS)
        return self._launch(merge_kernel, (*arrays, jnp.asarray(table)), (out_type,), grid, constants, cost=cost)[0]
