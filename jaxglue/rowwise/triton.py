"""The Triton backend: launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import triton
from jax_triton import triton_call

from jaxglue.rowwise import kernels

_HEADS = 16
"""Heads that a program holds at a time."""


@dataclass(frozen=True, kw_only=True)
class TritonBackend:
    """`RotateBackend` by our own kernels."""

    compute_capability: int
    """As Triton counts it: 90 for 9.0."""

    @classmethod
    def of(cls, capability: tuple[int, int]) -> "TritonBackend":
        """The backend for a GPU of this compute capability."""
        return cls(compute_capability=10 * capability[0] + capability[1])

    def rotate(self, q, k, weights, cos, sin, *, eps: float, inverse: bool = False):
        """See `RotateBackend`."""
        constants = {"HAS_NORM": weights is not None, "INVERSE": inverse}
        return self._heads(kernels.rotate_kernel, q, k, weights or (cos, cos), (cos, sin), eps, constants)

    def rotate_gradient(self, q, k, weights, cos, sin, dq_out, dk_out, *, eps: float):
        """See `RotateBackend`."""
        return self._heads(kernels.rotate_gradient_kernel, q, k, weights, (cos, sin, dq_out, dk_out), eps, {})

    def _heads(self, kernel, q, k, weights, arrays, eps: float, constants):
        """A program for each token; the result has the shapes of q and k."""
        B, T, N, H = q.shape
        K = k.shape[2]
        sizes = {"N": N, "K": K, "H": H, "EPS": eps, "BLOCK_H": triton.next_power_of_2(H // 2)}
        blocks = {"BLOCK_N": min(_HEADS, triton.next_power_of_2(N)), "BLOCK_K": min(_HEADS, triton.next_power_of_2(K))}
        rows = [x.reshape(B * T, -1) for x in (q, k, *arrays)]
        out_type = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows[:2])
        inputs = (*rows[:2], *weights, *rows[2:])
        out = self._launch(kernel, inputs, out_type, (B * T,), sizes | blocks | constants)
        return tuple(x.reshape(like.shape) for x, like in zip(out, (q, k), strict=True))

    def _launch(self, kernel, arrays, out_type, grid, constants, num_warps: int = 4):
        return triton_call(
            *arrays,
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            num_warps=num_warps,
            num_stages=1,
            compute_capability=self.compute_capability,
            **constants,
        )
