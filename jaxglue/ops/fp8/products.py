"""Products of e4m3 values by XLA, which calls cuBLAS, and their scales."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.fp8.encode import encode
from jaxglue.ops.quant.fp8 import FP8Weight


def dot(rows: Float[Array, "*B n"], matrix: Float[Array, "a b"], dimension: int, dtype) -> Float[Array, "*B m"]:
    """Contract the last axis of e4m3 rows with a dimension of an e4m3 matrix; round the float32 sums to `dtype`."""
    contracting = (((rows.ndim - 1,), (dimension,)), ((), ()))
    return jax.lax.dot_general(rows, matrix, contracting, preferred_element_type=dtype)


def rescale(product: Float[Array, "*B n"], *scales: Float[Array, "..."]) -> Float[Array, "*B n"]:
    """Multiply a product by its scales in float32 and round to its dtype."""
    total = product.astype(jnp.float32)
    for factor in scales:
        total *= factor
    return total.astype(product.dtype)


def input_gradient(
    cotangents: Sequence[Float[Array, "*B out"]], weights: Sequence[FP8Weight], scales: Float[Array, "*B 1"]
) -> Float[Array, "*B in"]:
    """Compute Σ dy·W, with every dy·(W's scales) quantized by the same row scales so that matmuls accumulate."""
    codes = [encode(dy, weight.scales, scales)[0] for dy, weight in zip(cotangents, weights, strict=True)]
    dtype = cotangents[0].dtype
    total, *others = (dot(dy, weight.codes, 0, dtype) for dy, weight in zip(codes, weights, strict=True))
    for other in others:
        total = other + total
    return rescale(total, scales)
