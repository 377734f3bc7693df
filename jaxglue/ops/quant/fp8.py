"""FP8 weights: e4m3 values (arXiv 2209.05433) with a scale for each output channel."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0
"""Largest e4m3 value."""
SMALLEST_SCALE = 2.0**-120
"""Least scale of a row that is not zero: one below 2⁻¹²⁶ may be flushed to zero, and 0 / 0 is NaN."""
BLOCK = 128
"""Columns that share a scale where a row has several."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FP8Weight:
    """A quantized matrix [out, in]. A pytree."""

    codes: Float[Array, "out in"]
    """float8_e4m3fn; a row's largest magnitude is 448."""
    scales: Float[Array, " out"] | Float[Array, "out in/128"]
    """Factor of each row, or of each 128 columns of a row, float32."""
    dtype: jnp.dtype = field(metadata={"static": True})
    """Dtype of the original matrix."""
    expand: bool = field(default=False, metadata={"static": True})
    """Multiply in the activations' dtype, after dequantization, instead of in FP8."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the dequantized matrix."""
        return self.codes.shape[0], self.codes.shape[1]


def is_multiplied_in_fp8(weight: object) -> bool:
    """Return whether this is a matrix for FP8 products."""
    return isinstance(weight, FP8Weight) and not weight.expand


def expand_products(tree: Any) -> Any:
    """Return a parameter tree whose FP8 matrices are dequantized for every product."""

    def is_fp8(leaf):
        return isinstance(leaf, FP8Weight)

    return jax.tree.map(lambda leaf: replace(leaf, expand=True) if is_fp8(leaf) else leaf, tree, is_leaf=is_fp8)


@jax.jit
def quantize_fp8(matrix: Float[Array, "out in"]) -> FP8Weight:
    """Quantize a matrix row by row to the nearest e4m3 values."""
    codes, scales = quantize_rows(matrix)
    return FP8Weight(codes=codes, scales=scales[:, 0], dtype=matrix.dtype)


def quantize_rows(x: Float[Array, "*B n"]) -> tuple[Float[Array, "*B n"], Float[Array, "*B 1"]]:
    """Return (e4m3 values, float32 scales) of x, whose last axis shares a scale; values times scale approximate x."""
    return encode_rows(x, row_scales(jnp.abs(x).max(axis=-1, keepdims=True)))


def row_scales(absmax: Float[Array, "*B 1"]) -> Float[Array, "*B 1"]:
    """Return float32 scales for rows of these largest magnitudes; 1 for rows of zeros."""
    scales = jnp.maximum(absmax.astype(jnp.float32) * (1 / LARGEST), SMALLEST_SCALE)
    return jnp.where(absmax > 0, scales, 1.0)


def encode_rows(x: Float[Array, "*B n"], scales: Float[Array, "*B 1"]) -> tuple[Array, Array]:
    """Return (e4m3 values of x / scales, scales)."""
    # Beyond 448 e4m3 has only NaN, and the quotient of a row's largest value may be rounded up.
    scaled = jnp.clip(x.astype(jnp.float32) / scales, -LARGEST, LARGEST)
    return scaled.astype(E4M3), scales


@partial(jax.jit, static_argnames="dtype")
def dequantize_fp8(quantized: FP8Weight, dtype=jnp.bfloat16) -> Float[Array, "out in"]:
    """Compute the values in `dtype`: e4m3 value times scale in float32, rounded once."""
    columns, scales = quantized.shape[1], quantized.scales
    factors = scales[:, None] if scales.ndim == 1 else jnp.repeat(scales, BLOCK, axis=1)[:, :columns]
    return (quantized.codes.astype(jnp.float32) * factors).astype(dtype)


def multiplied_in_fp8(weight: FP8Weight) -> FP8Weight:
    """Return the weight for FP8 products: its own codes, or rounded again where a row has several scales."""
    if weight.scales.ndim == 1:
        return replace(weight, expand=False)
    return replace(quantize_fp8(dequantize_fp8(weight, jnp.float32)), dtype=weight.dtype)
