"""NF4 (QLoRA, arXiv 2305.14314): blocks of 64 four-bit codes of normal quantiles, their scales quantized to 8 bits.

In bitsandbytes' folders a matrix is six tensors: `weight` (codes), two levels of scales, a code table per level, and a
JSON text with sizes and the scales' mean, as bytes. Source: bitsandbytes' `QuantState.as_dict`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxglue.files.json_file import parse_object
from jaxglue.ops.quant.bitsandbytes import (
    REMEDY,
    BitsAndBytesFormat,
    names_bitsandbytes,
    read_typed,
    refused,
    shared_config,
)
from jaxglue.ops.quant.blocks import dynamic_code, nearest
from jaxglue.ops.quant.formats import Quantized, Shape, Specs, Stored, TensorReader, register

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
_STATE = "quant_state.bitsandbytes__nf4"
_STATE_BYTES = 256
"""Size of the space-padded JSON text: fixed, so that tensor sizes are known before quantization."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NF4(Quantized):
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

    without_kernel: ClassVar[str | None] = None

    def dequantize(self, dtype) -> Float[Array, "out in"]:
        """Compute the values in `dtype`."""
        return dequantize_nf4(self, dtype)


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
    values = decode_nf4(codes).reshape(out, -1, BLOCK) * block_scales(quantized)[..., None]
    return values.astype(dtype).reshape(out, columns)


def block_scales(quantized: NF4) -> Float[Array, "out in/64"]:
    """Return the scales of the blocks, float32."""
    factors = jnp.repeat(quantized.scale_absmax, GROUP)[: quantized.scales.size].reshape(quantized.scales.shape)
    # The barrier keeps XLA from contracting to an FMA: bitsandbytes rounds twice.
    products = jax.lax.optimization_barrier(jnp.asarray(dynamic_code())[quantized.scales] * factors)
    return products + quantized.scale_offset


def decode_nf4(codes: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """Decode NF4 to float32 by a tree of selects, which fuses; a table look-up would not."""
    values = [jnp.float32(value) for value in VALUES]
    for bit in range(4):
        odd = (codes >> bit & 1).astype(bool)
        values = [jnp.where(odd, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


class NF4Format(BitsAndBytesFormat):
    """NF4 in memory and in bitsandbytes' folders."""

    name, label, flag, description = "nf4", "nf4", "--quantize nf4", "in nf4"
    weight, offered, few_values = NF4, True, True

    def check(self, widths: Mapping[str, int]) -> None:
        """Raise ValueError for rows that blocks do not divide."""
        for name, width in widths.items():
            if width % BLOCK:
                raise ValueError(
                    f"--quantize nf4 needs multiples of {BLOCK}, got {name}={width}: leave it out, or use int8"
                )

    def divides(self, matrices: Shape, devices: int) -> bool:
        """Return whether a device's matrices fill groups of scales."""
        return super().divides(matrices, devices) and math.prod(matrices) // devices % (BLOCK * GROUP) == 0

    def quantize(self, matrix: Float[Array, "out in"]) -> NF4:
        """Convert a matrix."""
        return quantize_nf4(matrix)

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether it is bitsandbytes' with 4 bits; raise ValueError for others than double-quantized NF4."""
        if not names_bitsandbytes(config, bits=4):
            return False
        kind = config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_use_double_quant", False)
        if kind != ("nf4", True):
            quantization = f"{kind[0]}, double quantization {kind[1]}"
            raise ValueError(f"config.json says {quantization}; only nf4, True is read: {REMEDY}")
        return True

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return bitsandbytes' entries."""
        return shared_config(bits=4, unquantized=unquantized) | {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
        }

    def specs(self, name: str, shape: Shape) -> Specs:
        """Return the six tensors of a matrix."""
        out, columns = shape
        blocks = out * columns // BLOCK
        return {
            name: jax.ShapeDtypeStruct((blocks * BLOCK // 2, 1), jnp.uint8),
            f"{name}.absmax": jax.ShapeDtypeStruct((blocks,), jnp.uint8),
            f"{name}.quant_map": jax.ShapeDtypeStruct((len(VALUES),), jnp.float32),
            f"{name}.nested_absmax": jax.ShapeDtypeStruct((-(-blocks // GROUP),), jnp.float32),
            f"{name}.nested_quant_map": jax.ShapeDtypeStruct((256,), jnp.float32),
            f"{name}.{_STATE}": jax.ShapeDtypeStruct((_STATE_BYTES,), jnp.uint8),
        }

    def tensors(self, name: str, weight: NF4) -> dict[str, np.ndarray]:
        """Return the values of `specs`."""
        state = np.frombuffer(_state(weight).encode().ljust(_STATE_BYTES), np.uint8)
        values, scale_values = np.array(VALUES, np.float32), dynamic_code()
        parts = weight.codes, weight.scales, values, weight.scale_absmax, scale_values, state
        specs = self.specs(name, weight.shape)
        return {part: np.asarray(array).reshape(specs[part].shape) for part, array in zip(specs, parts, strict=True)}

    def find(self, files: TensorReader, name: str, shape: Shape) -> Stored | None:
        """Return a matrix that has the JSON text."""
        if f"{name}.{_STATE}" not in files.tensors:
            return None
        shapes = {part: spec.shape for part, spec in self.specs(name, shape).items()}
        shapes[f"{name}.{_STATE}"] = files.tensors[f"{name}.{_STATE}"].shape
        return Stored(shapes, lambda files: _read(files, name, shape))


def _state(weight: NF4) -> str:
    return json.dumps(
        {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "dtype": str(weight.dtype),
            "shape": list(weight.shape),
            "nested_blocksize": GROUP,
            "nested_dtype": "float32",
            "nested_offset": float(weight.scale_offset),
        }
    )


def _read(files: TensorReader, name: str, shape: Shape) -> NF4:
    """Read an NF4 matrix; raise ValueError unless state and tables are those of double-quantized NF4."""
    out, columns = shape
    try:
        state = parse_object(files.read(f"{name}.{_STATE}").tobytes(), "the tensor")
        offset = np.float32(state["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise refused(files, name, f"its quant_state cannot be read ({error})") from error
    expected = {"quant_type": "nf4", "blocksize": BLOCK, "shape": [out, columns], "nested_blocksize": GROUP}
    if wrong := {key: state.get(key) for key, value in expected.items() if state.get(key) != value}:
        raise refused(files, name, f"its quant_state says {wrong}, expected {expected}")
    for table, values in (("quant_map", np.array(VALUES, np.float32)), ("nested_quant_map", dynamic_code())):
        if not np.array_equal(files.read(f"{name}.{table}"), values):
            raise refused(files, name, f"its {table} differs from bitsandbytes'")
    parts: dict[str, Any] = {
        "codes": read_typed(files, name, np.uint8).reshape(out, columns // 2),
        "scales": read_typed(files, f"{name}.absmax", np.uint8).reshape(out, columns // BLOCK),
        "scale_absmax": read_typed(files, f"{name}.nested_absmax", np.float32),
        "scale_offset": offset,
    }
    return NF4(**parts, dtype=jnp.dtype(state.get("dtype", "bfloat16")))


register(NF4Format())
