"""Products of adapters and their gradients by matmuls."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxglue.ops.quant.fp8 import encode_rows


@dataclass(frozen=True)
class ReferenceLora:
    """`LoraBackend` by matmuls."""

    def product(self, hidden, matrix, first: int, base=None, addend=None):
        """See `LoraBackend`; padding the matrix to all ranks costs less than slicing `hidden`."""
        ranks = ((0, 0), (first, hidden.shape[1] - first - matrix.shape[1]))
        padded = jnp.pad(matrix.astype(hidden.dtype), ranks)
        product = jax.lax.dot_general(hidden, padded, (((1,), (1,)), ((), ())))
        if base is None:
            return product
        scaled = base.product.astype(jnp.float32) * base.rows * (1.0 if base.columns is None else base.columns)
        total = scaled + product if addend is None else scaled + product + addend
        return total.astype(hidden.dtype)

    def add_product(self, x, y, hidden, matrix):
        """See `LoraBackend`."""
        return x + (y + self.product(hidden, matrix, 0))

    def gradients(self, dy, matrix, hidden, first: int, quantizer=None):
        """See `LoraBackend`."""
        own = hidden[:, first : first + matrix.shape[1]]
        dmatrix = jax.lax.dot_general(dy, own, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        codes = None if quantizer is None else encode_rows(dy * quantizer.columns, quantizer.rows)[0]
        return dy @ matrix.astype(dy.dtype), dmatrix, codes
