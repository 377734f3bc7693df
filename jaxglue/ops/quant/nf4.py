"""NF4 (QLoRA, arXiv 2305.14314): blocks of 64 four-bit codes of normal quantiles, their scales quantized to 8 bits."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxglue.ops.quant.blocks import dynamic_code, nearest

BLOCK = 64
"""Consecutive values of a row that share a scale."""
GROUP = 256
"""Consecutive scales, in row-major order, that share a float32 scale."""
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Value of each four-bit code (appendix E of the paper)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NF4:
    """A quantized matrix [out, in]. A pytree."""

    codes: UInt8[Array, "out in/2"]
    """Two values in a byte, the first in the high half."""
    scales: UInt8[Array, "out in/64"]
    """Codes of `dynamic_code` for each block's largest magnitude less `scale_offset`."""
    scale_absmax: Float[Array, " groups"]
    """Factor of each group of 256 scales, float32; the last group may be smaller."""
    scale_offset: Float[Array, ""]
    """The scales' mean, float32."""
    dtype: jnp.dtype = field(metadata={"static": True})
    """Dtype of the original matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the dequantized matrix."""
        return self.codes.shape[0], 2 * self.codes.shape[1]


@jax.jit
def quantize_nf4(matrix: Float[Array, "out in"]) -> NF4:
    """Quantize a matrix to the nearest codes, as bitsandbytes does with `compress_statistics`.

    All parts equal those of bitsandbytes' CUDA and PyTorch code, except for the last bit of the scales' mean, which
    depends on the order of summation.

    Raises:
        ValueError: the rows are not a multiple of 64 values long.
    """
    out, columns = matrix.shape
    if columns % BLOCK:
        raise ValueError(f"NF4 needs rows that are a multiple of {BLOCK} values long, got {[out, columns]}")
    blocks = matrix.astype(jnp.float32).reshape(out, -1, BLOCK)
    codes, absmax = nearest(blocks, np.array(VALUES, np.float32))
    codes = codes.reshape(out, columns // 2, 2)
    mean = _exact_sum(absmax.ravel()) / absmax.size
    scales, scale_absmax = nearest(_grouped(absmax - mean), dynamic_code())
    return NF4(
        codes=codes[..., 0] << 4 | codes[..., 1],
        scales=scales.ravel()[: absmax.size].reshape(absmax.shape),
        scale_absmax=scale_absmax,
        scale_offset=mean,
        dtype=matrix.dtype,
    )


def _exact_sum(values: Float[Array, " n"]) -> Float[Array, ""]:
    """Sum with one rounding, the same on every device: add halves with their rounding errors (Knuth's TwoSum)."""
    high = jnp.pad(values, (0, (1 << (values.size - 1).bit_length()) - values.size))
    low = jnp.zeros_like(high)
    while high.size > 1:
        (a, b), (a_low, b_low) = jnp.split(high, 2), jnp.split(low, 2)
        high = a + b
        part = high - a
        low = a_low + b_low + ((a - (high - part)) + (b - part))
    return (high + low)[0]


def _grouped(scales: Float[Array, "out blocks"]) -> Float[Array, "groups 256"]:
    return jnp.pad(scales.ravel(), (0, -scales.size % GROUP)).reshape(-1, GROUP)


@partial(jax.jit, static_argnames="dtype")
def dequantize_nf4(quantized: NF4, dtype=jnp.bfloat16) -> Float[Array, "out in"]:
    """Compute the values in `dtype`: code times scale in float32, rounded once."""
    out, columns = quantized.shape
    codes = jnp.stack([quantized.codes >> 4, quantized.codes & 0xF], axis=-1)
    values = _decode(codes).reshape(out, -1, BLOCK) * _scales(quantized)[..., None]
    return values.astype(dtype).reshape(out, columns)


def _scales(quantized: NF4) -> Float[Array, "out in/64"]:
    factors = jnp.repeat(quantized.scale_absmax, GROUP)[: quantized.scales.size].reshape(quantized.scales.shape)
    # The barrier keeps XLA from contracting to an FMA: bitsandbytes rounds twice.
    products = jax.lax.optimization_barrier(jnp.asarray(dynamic_code())[quantized.scales] * factors)
    return products + quantized.scale_offset


def _decode(codes: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """Decode NF4 to float32 by a tree of selects, which fuses; a table look-up would not."""
    values = [jnp.float32(value) for value in VALUES]
    for bit in range(4):
        odd = (codes >> bit & 1).astype(bool)
        values = [jnp.where(odd, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]
