"""MXFP4: blocks of 32 four-bit floats that share a power of two (OCP Microscaling Formats 1.0), as in GPT-OSS."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxglue.ops.quant.formats import Quantized, Shape, Specs, WeightFormat, register
from jaxglue.ops.quant.fp8 import E4M3

BLOCK = 32
"""Values that share a scale."""
_DEVIATION = 2.93
"""Standard deviation of uniformly random e2m1 values."""
LIFT = 6
"""Exponent in FP8 of a matrix's largest blocks, whose largest value is 6: 6 · 2⁶ is below e4m3's 448."""
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""


@partial(jax.tree_util.register_dataclass, data_fields=["blocks", "scales"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class MXFP4(Quantized):
    """A quantized array, in blocks along its last axis, of length I. A pytree."""

    blocks: UInt8[Array, "*B I/32 16"]
    """Two values in a byte, the first in the low half."""
    scales: UInt8[Array, "*B I/32"]
    """Exponents e8m0: the scale is 2^(s − 127); 255 is NaN."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the dequantized array."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return self.scales.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype that holds all values."""
        return jnp.dtype(jnp.bfloat16)

    without_kernel: ClassVar[str | None] = None

    def dequantize(self, dtype) -> Float[Array, "*B I"]:
        """Compute the values in `dtype`."""
        return dequantize_mxfp4(self, dtype)

    def check(self, name: str = "MXFP4 tensor") -> "MXFP4":
        """Return itself, after checking that blocks and scales are bytes and fit together.

        Raises:
            ValueError: they do not, as in a truncated checkpoint.
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


def dequantize_mxfp4(quantized: MXFP4, dtype=jnp.bfloat16) -> Float[Array, "*B I"]:
    """Compute the values in `dtype`, exact in bfloat16 and float32 for scales of at least 2^-125.

    Raises:
        ValueError: see `MXFP4.check`.
    """
    quantized.check()
    halves = jnp.stack([quantized.blocks & 0xF, quantized.blocks >> 4], axis=-1)
    scale = _power_of_two(quantized.scales)[..., None, None]
    return (decode_e2m1(halves) * scale).astype(dtype).reshape(quantized.shape)


def quantize_mxfp4(values: Float[Array, "*B I"]) -> MXFP4:
    """Round values to MXFP4, each block's largest to 4 … 6 times the scale; values in MXFP4 keep theirs.

    Of two values equally near, the smaller is taken.
    """
    x = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, BLOCK)
    magnitudes = jnp.abs(x)
    exponents = jax.lax.bitcast_convert_type(magnitudes.max(axis=-1), jnp.int32) >> 23
    scales = jnp.maximum(exponents - 2, 0)
    scaled = jnp.ldexp(magnitudes, 127 - scales[..., None])
    codes = encode_e2m1(jnp.copysign(scaled, x))
    return MXFP4(blocks=codes[..., ::2] | codes[..., 1::2] << 4, scales=scales.astype(jnp.uint8))


def encode_e2m1(
    values: Float[Array, "*B"], unit: Float[Array, "*#B"] | float = 1.0, *, to_even: bool = False
) -> UInt8[Array, "*B"]:
    """Round float32 in this unit to the nearest e2m1; zeros are positive.

    Args:
        values: to encode.
        unit: of the codes' values, of few bits: its products with the middles are exact, where a quotient is not.
        to_even: of two equally near take the even one, otherwise the smaller.
    """
    magnitudes, bounds = jnp.abs(values), [middle * unit for middle in _MIDDLES]
    above = [magnitudes >= x if to_even and index % 2 else magnitudes > x for index, x in enumerate(bounds)]
    codes = sum(each.astype(jnp.uint8) for each in above)
    return codes | jnp.where((values < 0) & (codes > 0), jnp.uint8(8), jnp.uint8(0))


def decode_e2m1(codes: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """Decode e2m1 (sign, two exponent bits, one mantissa bit) to float32 by arithmetic: a look-up would not fuse."""
    codes = codes.astype(jnp.int32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = (exponent + 126) << 23 | mantissa << 22
    magnitude = jnp.where(exponent > 0, normal, mantissa * (126 << 23))
    return jax.lax.bitcast_convert_type(magnitude | (codes >> 3) << 31, jnp.float32)


def _power_of_two(scales: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """Decode e8m0 to float32."""
    scales = scales.astype(jnp.int32)
    bits = jnp.where(scales == 0, 1 << 22, scales << 23)
    return jnp.where(scales == 255, jnp.nan, jax.lax.bitcast_convert_type(bits, jnp.float32))


def block_factors(quantized: MXFP4) -> Float[Array, "*B I/32"]:
    """Return the scales of the blocks, float32."""
    return _power_of_two(quantized.scales)


def mxfp4_scale(std: float) -> int:
    """Return the e8m0 exponent that gives uniformly random blocks about this standard deviation."""
    return 127 + round(math.log2(std / _DEVIATION))


def largest_exponents(quantized: MXFP4) -> Int[Array, " E"]:
    """Return the largest exponent of each matrix as stored, e8m0."""
    return quantized.scales.max(axis=(1, 2)).astype(jnp.int32)


def fp8_factors(largest: Int[Array, " E"]) -> Float[Array, " E"]:
    """Return the factors of matrices in e4m3 with these largest exponents, float32."""
    return jnp.ldexp(jnp.float32(1), largest - 127 - LIFT)


def fp8_codes(quantized: MXFP4, largest: Int[Array, " E"], *, transposed: bool) -> Float[Array, "E a b"]:
    """Return the values over `fp8_factors` in e4m3: exact for exponents within 14 of the largest."""
    values = dequantize_mxfp4(quantized, jnp.float32) / fp8_factors(largest)[:, None, None]
    return (values.swapaxes(1, 2) if transposed else values).astype(E4M3)


class MXFP4Format(WeightFormat):
    """Experts in MXFP4, as GPT-OSS's folders hold them."""

    name, label, flag, description = "mxfp4", "mxfp4", "MXFP4 in the model folder", "in mxfp4"
    weight = MXFP4
    parts: Mapping[str, int] = {"blocks": 2, "scales": 0}

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether it names MXFP4."""
        return config.get("quant_method") == "mxfp4"

    def part_specs(self, shape: Shape) -> Specs:
        """Return blocks and scales; raise ValueError where blocks do not divide rows."""
        *outer, columns = shape
        if columns % BLOCK:
            raise ValueError(f"MXFP4 experts need sizes that are multiples of {BLOCK}, got {columns}")
        scales = (*outer, columns // BLOCK)
        return {
            "blocks": jax.ShapeDtypeStruct((*scales, BLOCK // 2), jnp.uint8),
            "scales": jax.ShapeDtypeStruct(scales, jnp.uint8),
        }

    def random_part(self, part: str, key: Array, spec: jax.ShapeDtypeStruct, std: float) -> Array:
        """Return uniformly random blocks, or the one scale that gives them this deviation."""
        if part == "blocks":
            return jax.random.bits(key, spec.shape, spec.dtype)
        return jnp.full(spec.shape, mxfp4_scale(std), spec.dtype)

    def quantize(self, matrix: Float[Array, "*B I"]) -> MXFP4:
        """Convert matrices."""
        return quantize_mxfp4(matrix)

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return the entries of GPT-OSS's folders."""
        others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": others}

    def specs(self, name: str, shape: Shape) -> Specs:
        """Return blocks and scales of matrices [E, out, in]."""
        return {f"{name}_{part}": spec for part, spec in self.part_specs(shape).items()}

    def tensors(self, name: str, weight: MXFP4) -> dict[str, np.ndarray]:
        """Return the values of `specs`."""
        return {f"{name}_{part}": np.asarray(getattr(weight, part)) for part in self.parts}

    def join(self, parts: Mapping[str, Any]) -> MXFP4:
        """Return matrices of blocks and scales."""
        return MXFP4(**parts)


register(MXFP4Format())
