"""int8 weights with a scale for each output channel, the storage of LLM.int8() (arXiv 2208.07339), weights only."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

LARGEST = 127
"""Code of a row's largest magnitude."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Int8Weight:
    """A quantized matrix [out, in]. A pytree."""

    codes: Int8[Array, "out in"]
    absmax: Float[Array, " out"]
    """Largest magnitude of each row, float32."""
    dtype: jnp.dtype = field(metadata={"static": True})
    """Dtype of the original matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the dequantized matrix."""
        return self.codes.shape[0], self.codes.shape[1]


@jax.jit
def quantize_int8(matrix: Float[Array, "out in"]) -> Int8Weight:
    """Quantize a matrix row by row to the nearest code, as bitsandbytes does up to the rounding of its division."""
    values = matrix.astype(jnp.float32)
    absmax = jnp.abs(values).max(axis=1)
    factor = LARGEST / jnp.where(absmax > 0, absmax, 1)
    codes = jnp.round(values * factor[:, None]).astype(jnp.int8)
    return Int8Weight(codes=codes, absmax=absmax, dtype=matrix.dtype)


@partial(jax.jit, static_argnames="dtype")
def dequantize_int8(quantized: Int8Weight, dtype=jnp.bfloat16) -> Float[Array, "out in"]:
    """Compute the values in `dtype`: code times scale in float32, rounded once."""
    scales = quantized.absmax * (np.float32(1) / np.float32(LARGEST))
    return (quantized.codes.astype(jnp.float32) * scales[:, None]).astype(dtype)
