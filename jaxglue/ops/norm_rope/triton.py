"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.norm_rope import kernels
from jaxglue.ops.norm_rope.reference import LLAMA_NORM, HeadNorms, NormStyle
from jaxglue.ops.norm_rope.vjp import RotateSpec
from jaxglue.ops.quant.fp8 import E4M3

_ROW_VALUES = 512
"""Values of a row per warp."""
_HEADS = 16
"""Heads in a step of a program."""
_COST = KernelCost(kind=KernelKind.ROWS)


@dataclass(frozen=True, kw_only=True)
class TritonNormRope(Launcher):
    """`NormBackend` and `RotateBackend` by our own kernels."""

    def norm(self, x, weight, stream=None, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        constants = {"EPS": eps, **_style(style)}
        return self._rows(kernels.norm_kernel, (x, weight, stream), constants)[0].reshape(x.shape)

    def fp8_norm(self, x, weight, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        M, D = x.size // x.shape[-1], x.shape[-1]
        rows = jax.ShapeDtypeStruct((M,), jnp.float32)
        out_type = jax.ShapeDtypeStruct((M, D), E4M3), rows, rows
        constants = {"EPS": eps, **_style(style)}
        values, *others = self._rows(kernels.fp8_norm_kernel, (x, weight), constants, out_type)
        return values.reshape(x.shape), *(each.reshape(*x.shape[:-1], 1) for each in others)

    def norm_gradient(self, x, weight, dstream, dout, *, eps: float, style: NormStyle):
        """See `NormBackend`."""
        arrays, constants = (x, weight, dstream, dout), {"EPS": eps, "OFFSET": style.offset}
        return self._rows(kernels.norm_gradient_kernel, arrays, constants)[0].reshape(x.shape)

    def _rows(self, kernel, arrays, constants, out_type: tuple[jax.ShapeDtypeStruct, ...] = ()):
        """Launch a program for each row of the last axis; by default the result is like the first array's rows."""
        D = arrays[0].shape[-1]
        rows = [x if x is None or x.ndim == 1 else x.reshape(-1, D) for x in arrays]
        out_type = out_type or (shape_dtype_of(rows[0]),)
        block = triton.next_power_of_2(D)
        warps = min(max(block // _ROW_VALUES, 1), 16)
        constants |= {"D": D, "BLOCK": block}
        return self._launch(kernel, rows, out_type, (rows[0].shape[0],), constants, warps, cost=_COST)

    def rotate(self, q, k, weights, cos, sin, *, spec: RotateSpec, inverse: bool = False):
        """See `RotateBackend`."""
        weights = (cos, cos) if weights is None else weights  # unused without a norm
        return self._heads(kernels.rotate_kernel, q, k, weights, (cos, sin), spec, {"INVERSE": inverse})

    def rotate_gradient(self, q, k, weights, cos, sin, dq_out, dk_out, *, spec: RotateSpec):
        """See `RotateBackend`."""
        return self._heads(kernels.rotate_gradient_kernel, q, k, weights, (cos, sin, dq_out, dk_out), spec, {})

    def _heads(self, kernel, q, k, weights, arrays, spec: RotateSpec, constants):
        """Launch a program for each token; the result has the shapes of q and k."""
        B, T, N, H = q.shape
        K, turning = k.shape[2], 2 * arrays[0].shape[-1]
        heads = head_spec(H, turning, spec.eps, spec.style)
        rows = [x.reshape(B * T, -1) for x in (q, k, *arrays)]
        out_type = tuple(map(shape_dtype_of, rows[:2]))
        inputs = (*rows[:2], *weights, *rows[2:])
        constants |= {"N": N, "K": K, "spec": heads, **head_blocks(N, K)}
        out = self._launch(kernel, inputs, out_type, (B * T,), constants, cost=_COST)
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
        rows = [x.reshape(len(z), -1) for x in arrays]
        spec = head_spec(H, H, *((None, LLAMA_NORM) if norms is None else (norms.eps, norms.style)))
        constants = {"N": N, "K": K, "spec": spec, "WIDTH": z.shape[1], **head_blocks(N, K)}
        weights = rows[:1] * 2 if norms is None else norms.weights
        inputs = z, *weights, *rows, *written
        return self._launch(kernel, inputs, out_type, (len(z),), constants, cost=_COST)


def _style(style: NormStyle) -> dict[str, Any]:
    """Return the constants of a style, of whose other fields `NORM_ROPE` refuses all but the defaults."""
    return {"OFFSET": style.offset, "ROUNDS_FIRST": style.rounds_first}


def head_spec(H: int, turning: int, eps: float | None, style: NormStyle) -> kernels.HeadSpec:
    """Return the constants of heads."""
    sizes = {"H": H, "block": triton.next_power_of_2(H // 2), "turning": turning}
    return kernels.HeadSpec(**sizes, eps=eps, offset=style.offset, rounds_first=style.rounds_first)


def head_blocks(N: int, K: int) -> dict[str, int]:
    """Return the heads in a step of a program."""
    return {f"BLOCK_{name}": min(_HEADS, triton.next_power_of_2(heads)) for name, heads in (("N", N), ("K", K))}
