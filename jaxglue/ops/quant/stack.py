"""Matrices of all experts in a format of single matrices, as the rows of one."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.quant.formats import Quantized, WeightFormat


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Stack(Quantized):
    """Quantized matrices [E, out, in]. A pytree."""

    rows: Quantized
    """Rows of all matrices, [E·out, in], or of a device's share of them."""
    out: int = field(metadata={"static": True})
    """Rows of one matrix."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the dequantized matrices."""
        rows, columns = self.rows.shape
        return rows // self.out, self.out, columns

    @property
    def dtype(self) -> Any:
        """Return the dtype of the original matrices."""
        return self.rows.dtype

    def of_dtype(self, dtype) -> "Stack":
        """Return the same as quantized from originals of this dtype."""
        return Stack(rows=self.rows.of_dtype(dtype), out=self.out)

    def check(self, name: str) -> "Stack":
        """Return itself; raise ValueError with the name if arrays do not fit together."""
        self.rows.check(name)
        return self

    def dequantize(self, dtype) -> Float[Array, "E out in"]:
        """Compute the values in `dtype`, by XLA."""
        return self.rows.dequantize(dtype).reshape(self.shape)


def matrix_of(weight: Quantized) -> Quantized:
    """Return a quantized matrix, a stack's of the rows of all its matrices."""
    return weight.rows if isinstance(weight, Stack) else weight


def hold_matrices(made: WeightFormat, weight: Any, *, sensitive: bool = False) -> Any:
    """Return a matrix, or matrices [E, out, in], as a model in this format holds them."""
    if made.weight is None or isinstance(weight, Quantized) or weight.ndim < 3:
        return made.hold(weight, sensitive=sensitive)
    count, out, columns = weight.shape
    return Stack(rows=made.hold(jnp.reshape(weight, (count * out, columns)), sensitive=sensitive), out=out)
