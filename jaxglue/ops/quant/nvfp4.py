"""NVFP4: blocks of 16 four-bit floats with an e4m3 scale each, and a float32 scale of the matrix, as NVIDIA defines it.

In compressed-tensors' folders (`nvfp4-pack-quantized`) a matrix is `weight_packed`, `weight_scale`, and
`weight_global_scale`, which divides the others; in ModelOpt's `weight`, `weight_scale`, and `weight_scale_2`, which
multiplies them. Scales of activations are ignored: these are not quantized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxglue.ops.quant.formats import Quantized, Shape, Specs, Stored, TensorReader, WeightFormat, names_in, register
from jaxglue.ops.quant.fp8 import E4M3
from jaxglue.ops.quant.mxfp4 import decode_e2m1, encode_e2m1

BLOCK = 16
"""Values that share a scale."""
_REMEDY = "use the original model folder"
_DIVISOR, _WITHIN = 256.0, (2.0**-5, 7.0)
"""Divisor of matrices whose largest value is within these bounds, and their blocks' scales in e4m3's range."""
_MULTIPLES = 0.8, 0.9, 1.25, 1.5
"""Scales that are tried beside a sixth of a block's largest magnitude, in units of that: 1.5 puts the largest at 4."""
_ROUTERS = "*.mlp.gate", "*.mlp.router"
_LEAST = 2.0**-9
"""Smallest scale, e4m3's smallest value: blocks of values close to zero are not lost."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NVFP4(Quantized):
    """A quantized matrix [out, in]. A pytree."""

    codes: UInt8[Array, "out in/2"]
    """Two e2m1 values in a byte, the first in the low half."""
    scales: Float[Array, "out in/16"]
    """float8_e4m3fn."""
    divisors: Float[Array, " out"]
    """Divisor of the row's scales, float32: the matrix's, or in a stack of matrices each one's."""
    dtype: jnp.dtype = field(metadata={"static": True})
    """Dtype of the original matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the dequantized matrix."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    without_kernel: ClassVar[str | None] = "nvfp4 has no kernel"

    def dequantize(self, dtype) -> Float[Array, "out in"]:
        """Compute the values in `dtype`."""
        return dequantize_nvfp4(self, dtype)


@partial(jax.jit, static_argnames="dtype")
def dequantize_nvfp4(quantized: NVFP4, dtype=jnp.bfloat16) -> Float[Array, "out in"]:
    """Compute the values in `dtype`: e2m1 value times (scale over divisor) in float32, rounded once."""
    halves = jnp.stack([quantized.codes & 0xF, quantized.codes >> 4], axis=-1)
    scales = quantized.scales.astype(jnp.float32) / quantized.divisors[:, None]
    values = decode_e2m1(halves).reshape(*scales.shape, BLOCK) * scales[..., None]
    return values.astype(dtype).reshape(quantized.shape)


@jax.jit
def fit_scales(matrix: Float[Array, "out in"]) -> tuple[Float[Array, "out in/16"], Float[Array, ""]]:
    """Return the scales of a matrix's blocks, float8_e4m3fn, and their divisor, float32.

    Of a few scales each block gets the one of least square error, about a fifth below that of the largest magnitude at
    6. The divisor is a power of two, so that folders may hold its inverse, and the same for nearly all matrices: vLLM
    joins those of one input, and reads one divisor for them.
    """
    blocks = matrix.astype(jnp.float32).reshape(matrix.shape[0], -1, BLOCK)
    absmax = jnp.abs(blocks).max(axis=-1)
    largest = absmax.max()
    fitted = jnp.exp2(jnp.floor(jnp.log2(6 * 448 / _MULTIPLES[-1] / jnp.maximum(largest, 2.0**-100))))
    divisor = jnp.where((largest >= _WITHIN[0]) & (largest <= _WITHIN[1]), _DIVISOR, fitted)

    def scales(multiples: Array) -> Array:
        return jnp.clip(absmax / 6 * divisor * multiples, _LEAST, 448).astype(E4M3)

    def error(multiples: Array) -> Array:
        unit = (scales(multiples).astype(jnp.float32) / divisor)[..., None]
        return jnp.square(decode_e2m1(encode_e2m1(blocks, unit, to_even=True)) * unit - blocks).sum(axis=-1)

    chosen = jnp.ones_like(absmax)
    least = error(chosen)
    for multiple in _MULTIPLES:
        found = error(jnp.full_like(absmax, multiple))
        chosen, least = jnp.where(found < least, multiple, chosen), jnp.minimum(found, least)
    return scales(chosen), divisor


def encode_nvfp4(matrix: Float[Array, "out in"], scales: Float[Array, "out in/16"], divisor: Float[Array, ""]) -> NVFP4:
    """Round a matrix to the nearest values by these scales and their divisor."""
    out = len(matrix)
    blocks, factors = matrix.astype(jnp.float32).reshape(out, -1, BLOCK), scales.astype(jnp.float32) / divisor
    codes = encode_e2m1(blocks, factors[..., None], to_even=True).reshape(out, -1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return NVFP4(codes=packed, scales=scales, divisors=jnp.full(out, divisor, jnp.float32), dtype=matrix.dtype)


class NVFP4Format(WeightFormat):
    """Weights that folders hold in NVFP4, dequantized for each product."""

    name, label, flag, description = "nvfp4", "nvfp4", "NVFP4 in the model folder", "in nvfp4"
    weight, few_values, row_wise, holds_experts = NVFP4, True, True, True

    def check(self, widths: Mapping[str, int]) -> None:
        """Raise ValueError for rows that blocks do not divide."""
        for name, width in widths.items():
            if width % BLOCK:
                raise ValueError(f"NVFP4 needs multiples of {BLOCK}, got {name}={width}: {_REMEDY}")

    def quantize(self, matrix: Float[Array, "out in"]) -> NVFP4:
        """Convert a matrix by the scales of `fit_scales`."""
        return encode_nvfp4(matrix, *fit_scales(matrix))

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether it is compressed-tensors' with packed NVFP4."""
        return config.get("quant_method") == "compressed-tensors" and config.get("format") == "nvfp4-pack-quantized"

    def skips(self, config: Mapping[str, Any]) -> list[str]:
        """Return the modules that stay unquantized."""
        return names_in(config, "ignore")

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return compressed-tensors' entries for weights alone, as vLLM's kernels for 4-bit weights read them."""
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True}
        group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [*unquantized, r"re:.*mlp\.(gate|router)$"],
        }

    def specs(self, name: str, shape: Shape) -> Specs:
        """Return codes, scales and divisor of a matrix."""
        out, columns = shape
        return {
            f"{name}_packed": jax.ShapeDtypeStruct((out, columns // 2), jnp.uint8),
            f"{name}_scale": jax.ShapeDtypeStruct((out, columns // BLOCK), E4M3),
            f"{name}_global_scale": jax.ShapeDtypeStruct((1,), jnp.float32),
        }

    def tensors(self, name: str, weight: NVFP4) -> dict[str, np.ndarray]:
        """Return the values of `specs`."""
        parts = weight.codes, weight.scales, weight.divisors[:1]
        return dict(zip(self.specs(name, weight.shape), map(np.asarray, parts), strict=True))

    def find(self, files: TensorReader, name: str, shape: Shape) -> Stored | None:
        """Return a matrix that is packed; raise ValueError where its scales are absent."""
        packed, scale, divisor = (f"{name}_{part}" for part in ("packed", "scale", "global_scale"))
        if packed not in files.tensors or len(shape) != 2:
            return None
        if absent := [part for part in (scale, divisor) if part not in files.tensors]:
            raise ValueError(f"{packed} in {files.tensors[packed].file} is in NVFP4: expected {absent[0]} beside")
        out, columns = shape
        shapes = {packed: (out, columns // 2), scale: (out, columns // BLOCK), divisor: (1,)}
        if (static := f"{name.removesuffix('weight')}input_global_scale") in files.tensors:
            shapes[static] = files.tensors[static].shape
        return Stored(shapes, lambda files: _read(files, packed, scale, divisor))


def _read(files: TensorReader, packed: str, scale: str, divisor: str, *, inverse: bool = False) -> NVFP4:
    for name, dtype in ((packed, np.dtype(np.uint8)), (scale, E4M3)):
        if (stored := files.tensors[name].dtype) != dtype:
            raise ValueError(f"{name} in {files.tensors[name].file} is {stored}, expected {np.dtype(dtype)}: {_REMEDY}")
    codes = files.read(packed)
    of_scales = files.read(divisor).astype(np.float32)
    divisors = np.broadcast_to(1 / of_scales if inverse else of_scales, (len(codes),)).copy()
    return NVFP4(codes=codes, scales=files.read(scale), divisors=divisors, dtype=jnp.dtype(jnp.bfloat16))  # type: ignore[arg-type]


class ModelOptFormat(NVFP4Format):
    """NVFP4 in the folders of NVIDIA's ModelOpt, as weights alone (`W4A16_NVFP4`)."""

    name, flag = "nvfp4_modelopt", "NVFP4 in the model folder, in ModelOpt's layout"
    _ALGORITHMS = ("NVFP4", "W4A16_NVFP4")

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether it is ModelOpt's with NVFP4."""
        named = config.get("quant_method") == "modelopt" or config.get("quant_library") == "modelopt"
        return named and config.get("quant_algo") in self._ALGORITHMS

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return ModelOpt's entries of config.json, as vLLM reads them."""
        weights = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
        return {
            "quant_method": "modelopt",
            "quant_algo": self._ALGORITHMS[1],
            "group_size": BLOCK,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": [*unquantized, *_ROUTERS],
            "producer": {"name": "jaxglue"},
        }

    def beside(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return hf_quant_config.json, which ModelOpt's readers take before config.json."""
        about = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": None, "group_size": BLOCK}
        quantization = about | {"exclude_modules": config["ignore"]}
        return {"hf_quant_config.json": {"producer": config["producer"], "quantization": quantization}}

    def specs(self, name: str, shape: Shape) -> Specs:
        """Return codes, scales and factor of a matrix."""
        out, columns = shape
        return {
            name: jax.ShapeDtypeStruct((out, columns // 2), jnp.uint8),
            f"{name}_scale": jax.ShapeDtypeStruct((out, columns // BLOCK), E4M3),
            f"{name}_scale_2": jax.ShapeDtypeStruct((), jnp.float32),
        }

    def tensors(self, name: str, weight: NVFP4) -> dict[str, np.ndarray]:
        """Return the values of `specs`."""
        parts = weight.codes, weight.scales, 1 / np.asarray(weight.divisors)[0]
        return dict(zip(self.specs(name, weight.shape), map(np.asarray, parts), strict=True))

    def find(self, files: TensorReader, name: str, shape: Shape) -> Stored | None:
        """Return a matrix with a scale of its scales; raise ValueError where those are absent."""
        scale, factor = f"{name}_scale", f"{name}_scale_2"
        if factor not in files.tensors or len(shape) != 2:
            return None
        if absent := [part for part in (name, scale) if part not in files.tensors]:
            raise ValueError(f"{factor} in {files.tensors[factor].file} is of NVFP4: expected {absent[0]} beside")
        out, columns = shape
        shapes = {name: (out, columns // 2), scale: (out, columns // BLOCK), factor: files.tensors[factor].shape}
        if (static := f"{name.removesuffix('weight')}input_scale") in files.tensors:
            shapes[static] = files.tensors[static].shape
        return Stored(shapes, lambda files: _read(files, name, scale, factor, inverse=True))


register(NVFP4Format())
register(ModelOptFormat())
