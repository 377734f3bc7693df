"""int8 weights with a scale for each output channel, the storage of LLM.int8() (arXiv 2208.07339), weights only.

In bitsandbytes' folders a matrix is `weight`, `SCB` (largest magnitude per row) and `weight_format` (0: row-major).
Source: bitsandbytes' `Linear8bitLt`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from jaxglue.ops.quant.bitsandbytes import BitsAndBytesFormat, names_bitsandbytes, read_typed, refused, shared_config
from jaxglue.ops.quant.formats import Quantized, Shape, Specs, Stored, TensorReader, register

LARGEST = 127
"""Code of a row's largest magnitude."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Int8Weight(Quantized):
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

    without_kernel: ClassVar[str | None] = "weights of one byte have no kernel"

    def dequantize(self, dtype) -> Float[Array, "out in"]:
        """Compute the values in `dtype`."""
        return dequantize_int8(self, dtype)


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


class Int8Format(BitsAndBytesFormat):
    """int8 in memory and in bitsandbytes' folders."""

    name, label, flag, description = "int8", "int8", "--quantize int8", "in int8"
    weight, offered = Int8Weight, True

    def quantize(self, matrix: Float[Array, "out in"]) -> Int8Weight:
        """Convert a matrix."""
        return quantize_int8(matrix)

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether it is bitsandbytes' with 8 bits."""
        return names_bitsandbytes(config, bits=8)

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return bitsandbytes' entries."""
        return shared_config(bits=8, unquantized=unquantized) | {
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
        }

    def specs(self, name: str, shape: Shape) -> Specs:
        """Return the three tensors of a matrix."""
        module = name.removesuffix("weight")
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.int8),
            f"{module}SCB": jax.ShapeDtypeStruct(shape[:1], jnp.float32),
            f"{module}weight_format": jax.ShapeDtypeStruct((), jnp.uint8),
        }

    def tensors(self, name: str, weight: Int8Weight) -> dict[str, np.ndarray]:
        """Return the values of `specs`."""
        parts = weight.codes, weight.absmax, np.uint8(0)
        return dict(zip(self.specs(name, weight.shape), map(np.asarray, parts), strict=True))

    def find(self, files: TensorReader, name: str, shape: Shape) -> Stored | None:
        """Return a matrix that has an SCB; `weight_format` may be absent."""
        module = name.removesuffix("weight")
        if f"{module}SCB" not in files.tensors:
            return None
        shapes = {part: spec.shape for part, spec in self.specs(name, shape).items()}
        if f"{module}weight_format" not in files.tensors:
            del shapes[f"{module}weight_format"]
        return Stored(shapes, lambda files: _read(files, name))


def _read(files: TensorReader, name: str) -> Int8Weight:
    module = name.removesuffix("weight")
    if f"{module}weight_format" in files.tensors and int(files.read(f"{module}weight_format")) != 0:
        raise refused(files, name, "its weight_format is not row-major (0)")
    parts: dict[str, Any] = {
        "codes": read_typed(files, name, np.int8),
        "absmax": read_typed(files, f"{module}SCB", np.float32),
    }
    return Int8Weight(**parts, dtype=jnp.dtype(jnp.float16))


register(Int8Format())
