"""Magnitudes of weights with adapters (DoRA, arXiv 2402.09353): the norm of each row of W + s·B·A."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import is_quantized
from jaxglue.ops.quant.served import Served


@jax.jit
def row_norms(weight: Any) -> Float[Array, " out"]:
    """Return the norm of each row of a matrix [out, in], quantized or not, in float32."""
    return jnp.sqrt(_squares(matrix(weight, jnp.float32)))


def magnitude_gain(
    weight: Any, A: Float[Array, "R in"], up: Float[Array, "out R"], magnitude: Float[Array, " out"], *, dtype
) -> Float[Array, " out"]:
    """Return magnitude / ‖W + s·B·A‖ of each row, the norm a constant in the backward pass (section 4.3).

    ‖w + b·A‖² = ‖w‖² + 2·b·(A·w) + b·A·Aᵀ·bᵀ needs no matrix beside the weight, which is read as it is stored, or
    expanded to `dtype`, that of the product, if it is quantized. `up` is s·B.
    """
    A, b = jax.lax.stop_gradient((A, up))
    W = matrix(jax.lax.stop_gradient(weight), dtype)
    products = jax.lax.dot_general(W, A.astype(W.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    gram = jnp.matmul(A, A.T, precision="highest")
    squares = _squares(W) + jnp.sum(b * (2 * products + jnp.matmul(b, gram, precision="highest")), axis=1)
    norms = checkpoint_name(jnp.sqrt(jnp.maximum(squares, 0)), names.LOW_RANK)
    return magnitude / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny)


def matrix(weight: Any, dtype) -> Float[Array, "out in"]:
    """Return a weight as it is, or expanded to `dtype` if it is quantized."""
    if isinstance(weight, Served):
        return weight.original(dtype)
    return dequantize(weight, dtype) if is_quantized(weight) else weight


def _squares(weight: Float[Array, "out in"]) -> Float[Array, " out"]:
    return jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=1)
