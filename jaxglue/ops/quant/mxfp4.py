"""MXFP4: blocks of 32 four-bit floats that share a power of two (OCP Microscaling Formats 1.0); GPT-OSS ships it."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

BLOCK = 32
"""Values that share a scale."""


@partial(jax.tree_util.register_dataclass, data_fields=["blocks", "scales"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class MXFP4:
    """A quantized array; its last axis, of length I, is the one that blocks run along. A pytree."""

    blocks: UInt8[Array, "*B I/32 16"]
    """Two values in a byte, the first in the low half."""
    scales: UInt8[Array, "*B I/32"]
    """Exponents e8m0: the scale is 2^(s − 127); 255 is not a number."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that this stands for."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK)

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return self.scales.ndim

    def check(self, name: str = "MXFP4 tensor") -> "MXFP4":
        """Returns itself.

        Raises:
            ValueError: the two parts are not bytes, or do not fit together, as in a truncated checkpoint.
        """
        for part, array in (("blocks", self.blocks), ("scales", self.scales)):
            if array.dtype != jnp.uint8:
                raise ValueError(f"{name}: {part} must be uint8, got {array.dtype}")
        expected = (*self.scales.shape, BLOCK // 2)
        if self.blocks.shape != expected:
            raise ValueError(
                f"{name}: blocks must be {list(expected)} to fit scales {list(self.scales.shape)}, "
                f"got {list(self.blocks.shape)}: is the checkpoint truncated?"
            )
        return self


def dequantize(quantized: MXFP4, dtype=jnp.bfloat16) -> Float[Array, "*B I"]:
    """The values in `dtype`; exact in bfloat16 and float32 for every scale from 2^-125 on.

    Raises:
        ValueError: see `MXFP4.check`.
    """
    quantized.check()
    halves = jnp.stack([quantized.blocks & 0xF, quantized.blocks >> 4], axis=-1)
    scale = _power_of_two(quantized.scales)[..., None, None]
    return (_decode(halves) * scale).astype(dtype).reshape(quantized.shape)


def _decode(codes: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """e2m1 (sign, two bits of exponent, one of mantissa) → float32 by arithmetic: a table look-up would not fuse."""
    codes = codes.astype(jnp.int32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = (exponent + 126) << 23 | mantissa << 22
    magnitude = jnp.where(exponent > 0, normal, mantissa * (126 << 23))
    return jax.lax.bitcast_convert_type(magnitude | (codes >> 3) << 31, jnp.float32)


def _power_of_two(scales: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """e8m0 → float32."""
    scales = scales.astype(jnp.int32)
    bits = jnp.where(scales == 0, 1 << 22, scales << 23)
    return jnp.where(scales == 255, jnp.nan, jax.lax.bitcast_convert_type(bits, jnp.float32))
