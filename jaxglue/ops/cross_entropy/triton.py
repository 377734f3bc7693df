"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxglue.ops.cross_entropy.kernels import (
    cross_entropy_kernel,
    scaled_cross_entropy_kernel,
    softmax_gradient_kernel,
)
from jaxglue.ops.launch import Launcher
from jaxglue.ops.quant.fp8 import E4M3


@dataclass(frozen=True, kw_only=True)
class TritonCrossEntropy(Launcher):
    """`CrossEntropy` by our own kernels."""

    block: int = 4096
    """Logits in a step of a program."""
    num_warps: int = 8

    def __call__(self, logits, targets, weights, dtype):
        """See `CrossEntropy`."""
        M, V = logits.shape
        out_type = jax.ShapeDtypeStruct((M,), jnp.float32), jax.ShapeDtypeStruct((M, V), dtype)
        return self._call(cross_entropy_kernel, (logits, targets, weights), out_type)

    def softmax_gradient(self, logits, targets, weights, dtype):
        """See `SoftmaxGradient`."""
        M, V = logits.shape
        per_row = jax.ShapeDtypeStruct((M,), jnp.float32)
        out_type = per_row, jax.ShapeDtypeStruct((M, V), dtype), per_row
        return self._call(softmax_gradient_kernel, (logits, targets, weights), out_type)

    def scaled(self, products, row_scales, column_scales, targets, weights):
        """See `reference_scaled_cross_entropy`."""
        M, V = products.shape
        per_row = jax.ShapeDtypeStruct((M,), jnp.float32)
        arrays = products, row_scales.reshape(M), column_scales, targets, weights
        out_type = per_row, jax.ShapeDtypeStruct((M, V), E4M3), per_row
        losses, codes, scales = self._call(scaled_cross_entropy_kernel, arrays, out_type)
        return losses, codes, scales[:, None]

    def _call(self, kernel, arrays, out_type):
        M, V = arrays[0].shape
        constants = {"V": V, "BLOCK": self.block}
        return self._launch(kernel, arrays, out_type, (M,), constants, num_warps=self.num_warps, num_stages=2)
