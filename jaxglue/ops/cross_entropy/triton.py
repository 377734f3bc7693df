"""Launches of the kernel in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxglue.ops.cross_entropy.kernels import cross_entropy_kernel
from jaxglue.ops.launch import Launcher

_BLOCK = 4096
"""Logits in a step of a program of 256 threads."""


@dataclass(frozen=True, kw_only=True)
class TritonCrossEntropy(Launcher):
    """`CrossEntropy` by our own kernel."""

    def __call__(self, logits, targets, weights, dtype):
        """See `CrossEntropy`."""
        M, V = logits.shape
        out_type = jax.ShapeDtypeStruct((M,), jnp.float32), jax.ShapeDtypeStruct((M, V), dtype)
        arrays, constants = (logits, targets, weights), {"V": V, "BLOCK": _BLOCK}
        return self._launch(cross_entropy_kernel, arrays, out_type, (M,), constants, num_warps=8, num_stages=2)
