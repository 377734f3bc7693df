"""Launch of the kernel in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.fp8.kernels import encode_kernel
from jaxglue.ops.launch import Launcher
from jaxglue.ops.quant.fp8 import E4M3

_ROW_VALUES = 1024
"""Values of a row per warp."""


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
        constants = {"D": D, "BLOCK": block, "HAS_COLUMNS": columns is not None, "HAS_SCALES": scales is not None}
        warps = min(max(block // _ROW_VALUES, 1), 16)
        codes, scales = self._launch(encode_kernel, arrays, out_type, (M,), constants, warps)
        return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1)
