"""Bytes and FLOPs of single equations of a traced program."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxglue.ops.equations import equations

_TILE = 8
"""Multiples of sizes to which XLA pads 16-bit matmuls."""


def is_fp8(aval: Any) -> bool:
    """Return whether values are 8-bit floats."""
    return jax.dtypes.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize == 1


def fp8_to_transpose(eqn) -> int:
    """Return the bytes of FP8 operands that cuBLAS needs with the contracted dimension last, and gets otherwise."""
    pairs = zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=True)
    return sum(aval_bytes(var.aval) for var, (*_, last) in pairs if is_fp8(var.aval) and last + 1 < var.aval.ndim)


def padded_bytes(eqn) -> int:
    """Return the bytes of copies of a 16-bit matmul's operands and result that XLA makes for sizes of whole tiles."""
    values = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    if any(aval.ndim != 2 for aval in values) or any(aval.dtype.itemsize != 2 for aval in values[:2]):
        return 0
    shapes = [tuple(-(-size // _TILE) * _TILE for size in aval.shape) for aval in values]
    padded = zip(shapes, values, strict=True)
    return sum(math.prod(shape) * aval.dtype.itemsize for shape, aval in padded if shape != aval.shape)


def dot_flops(eqn) -> int:
    """Return the FLOPs of a `dot_general`."""
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[dim] for dim in contracting)


def aval_bytes(aval: Any) -> int:
    """Return the bytes of an array; keys and other odd types count as none."""
    try:
        return math.prod(aval.shape) * jax.dtypes.canonicalize_dtype(aval.dtype).itemsize
    except TypeError:
        return 0


def received_bytes(jaxpr: Jaxpr) -> float:
    """Return the bytes that a device receives in all-gathers and reduce-scatters of its program."""
    exchanges = ((eqn, n) for eqn, n in equations(jaxpr) if eqn.primitive.name in ("all_gather", "reduce_scatter"))
    return sum(
        repeat * abs(aval_bytes(eqn.outvars[0].aval) - aval_bytes(eqn.invars[0].aval)) for eqn, repeat in exchanges
    )
