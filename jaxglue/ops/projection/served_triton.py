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
from jaxglue.ops.quant.served import Served, ServedNF4, ServedStored

_TILE = (64, 128)
"""Rows and columns of a program."""


@dataclass(frozen=True, kw_only=True)
class TritonMerge(Launcher):
    """`MergeBackend` in Triton."""

    precision: str = "tf32"
    """Of the product of the adapter's matrices."""

    def merge(
        self, weight: Served, A: Float[Array, "E R in"], up: Float[Array, "E out R"], dtype, gain: Array | None = None
    ) -> Array:
        """See `MergeBackend`."""
        (experts, rows, rank), columns, (block_n, block_k) = up.shape, A.shape[2], _TILE
        step, low, top = weight.levels
        stored = weight.coding if isinstance(weight, ServedStored) else None
        of_nf4 = isinstance(weight, ServedNF4) or (stored is not None and stored.high_first)
        table = np.array(VALUES if of_nf4 else (0.0,), np.float32)
        if stored is not None:
            table = np.concatenate([stored.values, *stored.cells])
        constants = {
            "OUT": rows,
            "IN": columns,
            "R": rank,
            "SHARED": weight.block,
            "VALUES": len(VALUES) if of_nf4 else 0,
            "LEVELS": low is not None,
            "STORED": stored is not None,
            "HIGH_FIRST": stored is not None and stored.high_first,
            "GAIN": gain is not None,
            "BLOCK_R": rank_lanes(rank),
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "PRECISION": self.precision,
        }
        values, seeds = (weight.packed, weight.seeds) if isinstance(weight, ServedStored) else (weight.matrix, step)
        unused = (step if array is None else array for array in (low, top))
        arrays = values, A, up, step, *unused, seeds, jnp.asarray(table), step if gain is None else gain
        out_type = jax.ShapeDtypeStruct(weight.shape, dtype)
        grid = triton.cdiv(rows, block_n), triton.cdiv(columns, block_k), experts
        cost = KernelCost(kind=KernelKind.ROWS)
        return self._launch(merge_kernel, arrays, (out_type,), grid, constants, cost=cost)[0]
