"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxglue.ops.cross_entropy.kernels import cross_entropy_kernel, scaled_cross_entropy_kernel
from jaxglue.ops.launch import Launcher
from jaxglue.ops.quant.fp8 import E4M3

_BLOCK = 4096
"""Logits in a step of a program of 256 threads."""


@dataclass(frozen=True, kw_only=True)
class TritonCrossEntropy(Launcher):
    """`CrossEntropy` by our own kernels."""

    def __call__(self, logits, targets, weights, dtype):
        """See `CrossEntropy`."""
        M, V = logits.shape
        out_type = jax.ShapeDtypeStruct((M,), jnp.float32), jax.ShapeDtypeStruct((M, V), dtype)
        arrays, constants = (logits, targets, weights), {"V": V, "BLOCK": _BLOCK}
        return self._launch(cross_entropy_kernel, arrays, out_type, (M,), constants, num_warps=8, num_stages=2)

    def scaled(self, products, row_scales, column_scales, targets, weights):
        """See `reference_scaled_cross_entropy`."""
        M, V = products.shape
        per_row = jax.ShapeDtypeStruct((M,), jnp.float32)
        arrays = products, row_scales.reshape(M), column_scales, targets, weights
        out_type, constants = (per_row, jax.ShapeDtypeStruct((M, V), E4M3), per_row), {"V": V, "BLOCK": _BLOCK}
        compiled = {"num_warps": 8, "num_stages": 2}
        losses, codes, scales = self._launch(scaled_cross_entropy_kernel, arrays, out_type, (M,), constants, **compiled)
        return losses, codes, scales[:, None]
