"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.norm_rope import kernels
from jaxglue.ops.norm_rope.reference import HeadNorms
from jaxglue.ops.quant.fp8 import E4M3

_ROW_VALUES = 512
"""Values of a row per warp."""
_HEADS = 16
"""Heads in a step of a program."""
_COST = KernelCost(kind=KernelKind.ROWS)


@dataclass(frozen=True, kw_only=True)
class TritonNormRope(Launcher):
    """`NormBackend` and `RotateBackend` by our own kernels."""

    def norm(self, x, weight, *, eps: float):
        """See `NormBackend`."""
        return self._rows(kernels.norm_kernel, (x, weight), eps)[0].reshape(x.shape)

    def fp8_norm(self, x, weight, *, eps: float):
        """See `NormBackend`."""
        M, D = x.size // x.shape[-1], x.shape[-1]
        rows = jax.ShapeDtypeStruct((M,), jnp.float32)
        out_type = jax.ShapeDtypeStruct((M, D), E4M3), rows, rows
        values, *others = self._rows(kernels.fp8_norm_kernel, (x, weight), eps, out_type)
        return values.reshape(x.shape), *(each.reshape(*x.shape[:-1], 1) for each in others)

    def norm_gradient(self, x, weight, dresidual, dout, *, eps: float):
        """See `NormBackend`."""
        return self._rows(kernels.norm_gradient_kernel, (x, weight, dresidual, dout), eps)[0].reshape(x.shape)

    def _rows(self, kernel, arrays, eps: float, out_type: tuple[jax.ShapeDtypeStruct, ...] = ()):
        """Launch a program for each row of the last axis; by default the result is like the first array's rows."""
        D = arrays[0].shape[-1]
        rows = [x.reshape(-1, D) if x.ndim > 1 else x for x in arrays]
        out_type = out_type or (shape_dtype_of(rows[0]),)
        block = triton.next_power_of_2(D)
        constants = {"D": D, "EPS": eps, "BLOCK": block}
        warps = min(max(block // _ROW_VALUES, 1), 16)
        return self._launch(kernel, rows, out_type, (rows[0].shape[0],), constants, warps, cost=_COST)

    def rotate(self, q, k, weights, cos, sin, *, eps: float, inverse: bool = False):
        """See `RotateBackend`."""
        constants = {"HAS_NORM": weights is not None, "INVERSE": inverse}
        return self._heads(kernels.rotate_kernel, q, k, weights or (cos, cos), (cos, sin), eps, constants)

    def rotate_gradient(self, q, k, weights, cos, sin, dq_out, dk_out, *, eps: float):
        """See `RotateBackend`."""
        return self._heads(kernels.rotate_gradient_kernel, q, k, weights, (cos, sin, dq_out, dk_out), eps, {})

    def _heads(self, kernel, q, k, weights, arrays, eps: float, constants):
        """Launch a program for each token; the result has the shapes of q and k."""
        B, T, N, H = q.shape
        K = k.shape[2]
        sizes = {"N": N, "K": K, "H": H, "EPS": eps, "BLOCK_H": triton.next_power_of_2(H // 2)}
        blocks = {"BLOCK_N": min(_HEADS, triton.next_power_of_2(N)), "BLOCK_K": min(_HEADS, triton.next_power_of_2(K))}
        rows = [x.reshape(B * T, -1) for x in (q, k, *arrays)]
        out_type = tuple(map(shape_dtype_of, rows[:2]))
        inputs = (*rows[:2], *weights, *rows[2:])
        out = self._launch(kernel, inputs, out_type, (B * T,), sizes | blocks | constants, cost=_COST)
        return out[0].reshape(q.shape), out[1].reshape(k.shape)

    def split_rotate(self, z, heads, norms: HeadNorms | None, cos, sin):
        """Return `rotate` of the first N·H and the next K·H columns of z [M, width], for heads (N, K, H)."""
        M, (N, K, H) = len(z), heads
        out_type = tuple(jax.ShapeDtypeStruct((M, n * H), z.dtype) for n in (N, K))
        return self._split(kernels.split_rotate_kernel, z, heads, norms, (cos, sin), out_type)

    def split_rotate_gradient(self, z, heads, norms: HeadNorms | None, cos, sin, gradients, dz):
        """Return dz, the gradient to z, with its first columns from the gradients to `split_rotate`'s results."""
        out = jax.new_ref(dz)
        self._split(kernels.split_rotate_gradient_kernel, z, heads, norms, (cos, sin, *gradients), (), out)
        return jax.freeze(out)

    def _split(self, kernel, z, heads, norms: HeadNorms | None, arrays, out_type, *written):
        N, K, H = heads
        rows, eps = [x.reshape(len(z), -1) for x in arrays], 0.0 if norms is None else norms.eps
        sizes = {"N": N, "K": K, "H": H, "EPS": eps, "HAS_NORM": norms is not None, "WIDTH": z.shape[1]}
        sizes |= {"BLOCK_N": min(_HEADS, triton.next_power_of_2(N)), "BLOCK_K": min(_HEADS, triton.next_power_of_2(K))}
        weights = rows[:1] * 2 if norms is None else norms.weights
        inputs = z, *weights, *rows, *written
        sizes["BLOCK_H"] = triton.next_power_of_2(H // 2)
        return self._launch(kernel, inputs, out_type, (len(z),), sizes, cost=_COST)
