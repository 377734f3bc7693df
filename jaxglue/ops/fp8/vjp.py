"""Differentiation rule of FP8 products with frozen weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.quant.fp8 import FP8Weight, encode_rows, quantize_rows, row_scales


@jax.custom_vjp
def project_rows(x: Float[Array, "*B in"], weights: tuple[FP8Weight, ...]) -> tuple[Float[Array, "*B out"], ...]:
    """See `project_fp8`."""
    codes, scales = quantize_rows(x)
    return tuple(_rescale(_dot(codes, weight.codes, 1, x.dtype), scales, weight.scales) for weight in weights)


def _forward(x, weights):
    return project_rows(x, weights), weights


def _backward(weights, cotangents):
    folded = [dy.astype(jnp.float32) * weight.scales for dy, weight in zip(cotangents, weights, strict=True)]
    absmax = [jnp.abs(dy).max(axis=-1, keepdims=True) for dy in folded]
    scales = row_scales(jnp.stack(absmax).max(axis=0))
    codes = [encode_rows(dy, scales)[0] for dy in folded]
    dtype = cotangents[0].dtype
    # A common scale lets the matmuls accumulate one onto another.
    dx, *others = (_dot(dy, weight.codes, 0, dtype) for dy, weight in zip(codes, weights, strict=True))
    for other in others:
        dx = other + dx
    return _rescale(dx, scales), None


def _dot(rows, matrix, dimension: int, dtype) -> Array:
    """Contract the last axis of e4m3 rows with a dimension of an e4m3 matrix."""
    contracting = (((rows.ndim - 1,), (dimension,)), ((), ()))
    return jax.lax.dot_general(rows, matrix, contracting, preferred_element_type=dtype)


def _rescale(product, *scales) -> Array:
    total = product.astype(jnp.float32)
    for factor in scales:
        total *= factor
    return total.astype(product.dtype)


project_rows.defvjp(_forward, _backward)
