"""Products of e4m3 values by XLA, which calls cuBLAS, and their scales."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.quant.fp8 import E4M3, LARGEST, FP8Weight


def dot(rows: Float[Array, "*B n"], matrix: Float[Array, "a b"], dimension: int, dtype) -> Float[Array, "*B m"]:
    """Contract the last axis of e4m3 rows with a dimension of an e4m3 matrix; round the float32 sums to `dtype`."""
    contracting = (((rows.ndim - 1,), (dimension,)), ((), ()))
    return jax.lax.dot_general(rows, matrix, contracting, preferred_element_type=dtype)


def dot_to_e4m3(rows: Float[Array, "*B n"], matrix: Float[Array, "m n"]) -> tuple[Float[Array, "*B m"], float]:
    """Return (codes, factor) of products along last axes, which are rounded to e4m3 codes times one factor.

    A quarter of the largest sum of n products is the largest code: real sums do not reach it, and rows without outliers
    still have all bits of e4m3, a floating-point format. cuBLAS writes the codes itself.
    """
    shrink = 2.0 ** -round(math.log2(rows.shape[-1] * LARGEST / 4))
    return jnp.clip(dot(rows, matrix, 1, jnp.float32) * shrink, -LARGEST, LARGEST).astype(E4M3), 1 / shrink


def rescale(product: Float[Array, "*B n"], *scales: Float[Array, "..."], dtype=None) -> Float[Array, "*B n"]:
    """Multiply a product by its scales in float32 and round to `dtype`, by default its own."""
    total = product.astype(jnp.float32)
    for factor in scales:
        total *= factor
    return total.astype(dtype or product.dtype)


def input_products(
    codes: Sequence[Float[Array, "*B out"]], weights: Sequence[FP8Weight], dtype
) -> Float[Array, "*B in"]:
    """Compute Σ dy·W from codes of dy·(W's scales), without their rows' shared scales: matmuls accumulate."""
    total, *others = (dot(dy, weight.codes, 0, dtype) for dy, weight in zip(codes, weights, strict=True))
    for other in others:
        total = other + total
    return total
