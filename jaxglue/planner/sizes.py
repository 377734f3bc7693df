"""Bytes and FLOPs of a traced program's arrays and equations."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxglue.engine.equations import equations


class Sizes:
    """Bytes, FLOPs and loops' lengths in the order in which a program's cost asks for them.

    Args:
        given: numbers in place of those of the program's own shapes.
    """

    def __init__(self, given: Sequence[int] | None = None):
        self.read: list[int] = []
        self._given = None if given is None else iter(given)

    def __call__(self, own: int) -> int:
        """Return a number of the program, or the one given in its place."""
        self.read.append(own if self._given is None else next(self._given))
        return self.read[-1]

    def of(self, var: Any) -> int:
        """Return a variable's bytes."""
        return self(aval_bytes(var.aval) if self._given is None else 0)


def is_fp8(aval: Any) -> bool:
    """Return whether values are 8-bit floats."""
    return jax.dtypes.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize == 1


def fp8_to_transpose(eqn) -> int:
    """Return the bytes of FP8 operands that cuBLAS needs with the contracted dimension last, and gets otherwise."""
    pairs = zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=True)
    return sum(aval_bytes(var.aval) for var, (*_, last) in pairs if is_fp8(var.aval) and last + 1 < var.aval.ndim)


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
