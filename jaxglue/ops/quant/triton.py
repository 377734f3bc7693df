"""Launches of the Triton kernels."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jaxtyping import Array, Float

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.quant.blocks import dynamic_code
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.fp8 import BLOCK, E4M3, FP8Weight
from jaxglue.ops.quant.kernels import fp8_kernel, mxfp4_kernel, mxfp4_transposed_kernel, nf4_kernel
from jaxglue.ops.quant.mxfp4 import LIFT, MXFP4
from jaxglue.ops.quant.nf4 import GROUP, NF4, VALUES

MXFP4_BLOCKS = 128
"""Blocks of 32 values in a program of 128 threads: each reads 16 bytes and writes 64."""
NF4_BLOCKS = 64
"""Blocks of 64 values likewise."""
FP8_TILE = (4096, 512)
"""Values of e4m3 in a program, and most columns: each thread reads 16 bytes at a time."""
MXFP4_TRANSPOSED_TILE = (64, 16)
"""Rows, and words of eight codes, in a program that writes FP8 transposed."""


@dataclass(frozen=True, kw_only=True)
class TritonDequantize(Launcher):
    """`DequantizeBackend` in Triton, for NF4, MXFP4 and FP8."""

    def dequantize(self, weight: Quantized, dtype) -> Float[Array, "*B out in"]:
        """See `DequantizeBackend`."""
        if isinstance(weight, MXFP4):
            return self._mxfp4(weight, dtype)
        if isinstance(weight, FP8Weight):
            return self._fp8(weight, dtype)
        assert isinstance(weight, NF4), weight
        return self._nf4(weight, dtype)

    def _mxfp4(self, weight: MXFP4, dtype, largest=None):
        weight.check()
        out_type, count = jax.ShapeDtypeStruct(weight.shape, dtype), weight.scales.size
        words = 0 if largest is None else weight.shape[1] * weight.shape[2] // 8
        constants = {"COUNT": count, "WORDS": words, "LIFT": LIFT, "BLOCK": MXFP4_BLOCKS}
        arrays = weight.blocks, weight.scales, weight.scales if largest is None else largest
        cost, grid = KernelCost(kind=KernelKind.MXFP4), (triton.cdiv(count, MXFP4_BLOCKS),)
        return self._launch(mxfp4_kernel, arrays, (out_type,), grid, constants, cost=cost)[0]

    def mxfp4_codes(self, weight: MXFP4, largest, *, transposed: bool) -> Float[Array, "E a b"]:
        """See `DequantizeBackend`."""
        if not transposed:
            return self._mxfp4(weight, E4M3, largest)
        (E, N, K), (block_n, block_w) = weight.shape, MXFP4_TRANSPOSED_TILE
        constants = {"N": N, "K": K, "LIFT": LIFT, "BLOCK_N": block_n, "BLOCK_W": block_w}
        arrays, out_type = (weight.blocks, weight.scales, largest), jax.ShapeDtypeStruct((E, K, N), E4M3)
        grid = triton.cdiv(N, block_n), triton.cdiv(K // 8, block_w), E
        cost = KernelCost(kind=KernelKind.ROWS)
        return self._launch(mxfp4_transposed_kernel, arrays, (out_type,), grid, constants, cost=cost)[0]

    def _nf4(self, weight: NF4, dtype):
        parts = weight.codes, weight.scales, weight.scale_absmax, weight.scale_offset
        tables = jnp.asarray(dynamic_code()), jnp.asarray(np.array(VALUES, np.float32))
        out_type, count = jax.ShapeDtypeStruct(weight.shape, dtype), weight.scales.size
        constants, grid = {"COUNT": count, "GROUP": GROUP, "BLOCK": NF4_BLOCKS}, (triton.cdiv(count, NF4_BLOCKS),)
        cost = KernelCost(kind=KernelKind.ROWS)
        return self._launch(nf4_kernel, (*parts, *tables), (out_type,), grid, constants, cost=cost)[0]

    def _fp8(self, weight: FP8Weight, dtype):
        (rows, columns), (values, most) = weight.shape, FP8_TILE
        block_c = min(most, triton.next_power_of_2(columns))
        block_r, shared = values // block_c, 0 if weight.scales.ndim == 1 else BLOCK
        constants = {"ROWS": rows, "COLUMNS": columns, "SHARED": shared, "BLOCK_R": block_r, "BLOCK_C": block_c}
        arrays, out_type = (weight.values, weight.scales), jax.ShapeDtypeStruct(weight.shape, dtype)
        grid, cost = (triton.cdiv(rows, block_r), triton.cdiv(columns, block_c)), KernelCost(kind=KernelKind.ROWS)
        return self._launch(fp8_kernel, arrays, (out_type,), grid, constants, cost=cost)[0]
