"""Differentiation rule of a matmul with a quantized matrix."""

from functools import partial
from typing import Protocol

import jax
from jaxtyping import Array, Float, Int

from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.mxfp4 import MXFP4


class DequantizeBackend(Protocol):
    """Kernels of one backend, hashable."""

    def dequantize(self, weight: Quantized, dtype) -> Array:
        """Compute the values of a quantized weight."""

    def mxfp4_codes(self, weight: MXFP4, largest: Int[Array, " E"], *, transposed: bool) -> Array:
        """Compute the codes of `mxfp4_to_fp8` from each matrix's largest exponent."""


def dequantize_with(kernels: DequantizeBackend | None, weight: Quantized, dtype) -> Array:
    """Compute the values by kernels, or by the reference where there are none."""
    return weight.dequantize(dtype) if kernels is None else kernels.dequantize(weight, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(kernels: DequantizeBackend | None, x: Float[Array, "*B in"], weight: Quantized) -> Float[Array, "*B out"]:
    """Compute x·Wᵀ in x's dtype."""
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    matrix = dequantize_with(kernels, weight, x.dtype)
    return jax.lax.dot_general(x, matrix, contract_last, preferred_element_type=x.dtype)


project.defvjp(
    lambda kernels, x, weight: (project(kernels, x, weight), weight),
    lambda kernels, weight, dy: (dy @ dequantize_with(kernels, weight, dy.dtype), None),
)
