"""Launch of the kernel in `encode_kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.projection.encode_kernels import encode_kernel
from jaxglue.ops.quant.fp8 import E4M3

_ROW_VALUES = 1024
"""Values of a row per warp."""
_ROWS = 4
"""Rows of a program that reads factors of columns too."""


@dataclass(frozen=True, kw_only=True)
class TritonEncode(Launcher):
    """`EncodeBackend` by our own kernel."""

    def encode(self, x, columns, scales):
        """See `EncodeBackend`."""
        rows = x.reshape(-1, x.shape[-1])
        M, D = rows.shape
        block = triton.next_power_of_2(D)
        out_type = jax.ShapeDtypeStruct((M, D), E4M3), jax.ShapeDtypeStruct((M,), jnp.float32)
        unused = jnp.zeros(1, jnp.float32)
        arrays = rows, unused if columns is None else columns, unused if scales is None else scales.reshape(M)
        sizes = {"M": M, "D": D, "ROWS": 1 if columns is None else _ROWS, "BLOCK": block}
        constants = sizes | {"HAS_COLUMNS": columns is not None, "HAS_SCALES": scales is not None}
        grid, warps = (triton.cdiv(M, sizes["ROWS"]),), min(max(block // _ROW_VALUES, 1), 16)
        cost = KernelCost(kind=KernelKind.ROWS)
        codes, scales = self._launch(encode_kernel, arrays, out_type, grid, constants, warps, cost=cost)
        return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1)
