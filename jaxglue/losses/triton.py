"""Launches of the kernel in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax_triton import triton_call

from jaxglue.losses.kernels import cross_entropy_kernel

_BLOCK = 4096
"""Logits that a program of 256 threads reads at a time."""


@dataclass(frozen=True, kw_only=True)
class TritonCrossEntropy:
    """`CrossEntropy` by our own kernel."""

    compute_capability: int
    """As Triton counts it: 90 for 9.0."""

    def __call__(self, logits, targets, weights, dtype):
        """See `CrossEntropy`."""
        M, V = logits.shape
        out_type = jax.ShapeDtypeStruct((M,), jnp.float32), jax.ShapeDtypeStruct((M, V), dtype)
        constants = {"V": V, "BLOCK": _BLOCK}
        return self._launch(cross_entropy_kernel, (logits, targets, weights), out_type, (M,), constants)

    def _launch(self, kernel, arrays, out_type, grid, constants):
        return triton_call(
            *arrays,
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            num_warps=8,
            num_stages=2,
            compute_capability=self.compute_capability,
            **constants,
        )
