"""FP8 weights: e4m3 values (arXiv 2209.05433) with a scale for each output channel.

Folders on the hub hold a matrix as e4m3 values and their scales, read without another rounding: `weight_scale` of a
tensor or of output channels (compressed-tensors' `float-quantized`), or of blocks of 128 × 128; or `weight_scale_inv`
of such blocks (DeepSeek, Qwen). Both multiply the values. Scales of activations are ignored, since activations are
quantized by token, and those of a key/value cache.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxglue.ops.quant.formats import Quantized, Shape, Specs, Stored, TensorReader, WeightFormat, names_in, register

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0
"""Largest e4m3 value."""
SMALLEST_SCALE = 2.0**-120
"""Least scale of a row that is not zero: one below 2⁻¹²⁶ may be flushed to zero, and 0 / 0 is NaN."""
BLOCK = 128
"""Columns that share a scale where a row has several."""
_METHODS = {
    "fp8": ("quant_algo", None),
    "fbgemm_fp8": ("quant_algo", None),
    "compressed-tensors": ("format", "float-quantized"),
    "modelopt": ("quant_algo", "FP8"),
}
"""Methods that store e4m3 values with their scales, each with an entry and its value for that."""
_LINEAR = ("_proj.weight", "_proj_with_mqa.weight")
"""Ends of the names of linear layers."""
_SCALES = ("weight_scale", "weight_scale_inv")
_ACTIVATION_SCALE = "input_scale"
_CACHE_SCALE = re.compile(r".*\.self_attn\.([kv]_proj\.(output|[kv])_scale|(q|k|v|kv|prob)_scale)")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FP8Weight(Quantized):
    """A quantized matrix [out, in]. A pytree."""

    values: Float[Array, "out in"]
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
        return self.values.shape[0], self.values.shape[1]

    without_kernel: ClassVar[str | None] = None

    def dequantize(self, dtype) -> Float[Array, "out in"]:
        """Compute the values in `dtype`."""
        return dequantize_fp8(self, dtype)


def is_multiplied_in_fp8(weight: object) -> bool:
    """Return whether this is a matrix for FP8 products."""
    return isinstance(weight, FP8Weight) and not weight.expand


@jax.jit
def quantize_fp8(matrix: Float[Array, "out in"]) -> FP8Weight:
    """Quantize a matrix row by row to the nearest e4m3 values."""
    values, scales = quantize_rows(matrix)
    return FP8Weight(values=values, scales=scales[:, 0], dtype=matrix.dtype)


def quantize_rows(x: Float[Array, "*B n"]) -> tuple[Float[Array, "*B n"], Float[Array, "*B 1"]]:
    """Return (e4m3 values, float32 scales) of x, whose last axis shares a scale; values times scale approximate x."""
    return encode_rows(x, row_scales(jnp.abs(x).max(axis=-1, keepdims=True)))


def rounded_rows(x: Float[Array, "*B n"]) -> Float[Array, "*B n"]:
    """Return x as its e4m3 values with a scale for each row, in its dtype."""
    values, scales = quantize_rows(x)
    return (values.astype(jnp.float32) * scales).astype(x.dtype)


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
    return (quantized.values.astype(jnp.float32) * factors).astype(dtype)


def multiplied_in_fp8(weight: FP8Weight) -> FP8Weight:
    """Return the weight for FP8 products: its own values, or rounded again where a row has several scales."""
    if weight.scales.ndim == 1:
        return replace(weight, expand=False)
    return replace(quantize_fp8(dequantize_fp8(weight, jnp.float32)), dtype=weight.dtype)


class Quantizer(NamedTuple):
    """Scales by which cotangents dy [M, N] become e4m3 values: dy · columns / rows."""

    columns: Float[Array, " N"]
    rows: Float[Array, "M 1"]


class ScaledProduct(NamedTuple):
    """A product [M, N] whose factors are still to be applied."""

    product: Float[Array, "M N"]
    rows: Float[Array, "M 1"]
    columns: Float[Array, " N"] | None = None


class FP8Format(WeightFormat):
    """Frozen weights in FP8, multiplied in it."""

    name, label, flag, description = "fp8", "fp8", "--matmul fp8", "stored and multiplied in fp8 (e4m3)"
    weight, fp8, row_wise = FP8Weight, True, True

    def quantize(self, matrix: Float[Array, "out in"]) -> FP8Weight:
        """Convert a matrix."""
        return quantize_fp8(matrix)

    def hold(self, matrix: Any, *, sensitive: bool = False) -> Any:
        """Return a matrix for FP8 products."""
        return multiplied_in_fp8(matrix) if isinstance(matrix, FP8Weight) else super().hold(matrix)

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return the entry that all tools read."""
        return {"quant_method": "fp8"}


class StoredFP8Format(WeightFormat):
    """Weights that a folder holds in FP8, dequantized for each product."""

    name, label, flag, description = "fp8_stored", "fp8", "FP8 in the model folder", "stored in fp8 (e4m3)"
    weight, row_wise, holds_experts = FP8Weight, True, True

    def quantize(self, matrix: Float[Array, "out in"]) -> FP8Weight:
        """Convert a matrix."""
        return replace(quantize_fp8(matrix), expand=True)

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether it names e4m3 values with scales.

        Raises:
            ValueError: another format of the same tools, or other blocks.
        """
        method, remedy = config.get("quant_method"), "use the original model folder with --matmul fp8"
        if not isinstance(method, str) or method not in _METHODS:
            return False
        key, expected = _METHODS[method]
        if config.get(key) != expected or not _holds_floats(config):
            raise ValueError(f"{method}'s {key} {config.get(key)!r:.100} in config.json is not read: {remedy}")
        if (block := config.get("weight_block_size")) not in (None, [BLOCK, BLOCK]):
            raise ValueError(f"weight_block_size {block!r:.100} in config.json: expected [128, 128]: {remedy}")
        return True

    def skips(self, config: Mapping[str, Any]) -> list[str]:
        """Return the modules that stay unquantized."""
        return names_in(config, "ignore") + names_in(config, "modules_to_not_convert")

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return compressed-tensors' entries: scales of output channels, and of each token's activations."""
        eight = {"num_bits": 8, "type": "float", "symmetric": True}
        activations = eight | {"strategy": "token", "dynamic": True}
        weights = eight | {"strategy": "channel", "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [*unquantized, r"re:.*mlp\.(gate|router)$"],
        }

    def specs(self, name: str, shape: Shape) -> Specs:
        """Return values and scales of a matrix."""
        scale = f"{name.removesuffix('weight')}weight_scale"
        return {
            name: jax.ShapeDtypeStruct(shape, E4M3),
            scale: jax.ShapeDtypeStruct((shape[0], 1), jnp.float32),
        }

    def tensors(self, name: str, weight: FP8Weight) -> dict[str, np.ndarray]:
        """Return the values of `specs`."""
        parts = np.asarray(weight.values), np.asarray(weight.scales)[:, None]
        return dict(zip(self.specs(name, weight.shape), parts, strict=True))

    def find(self, files: TensorReader, name: str, shape: Shape) -> Stored | None:
        """Return a matrix in e4m3.

        Raises:
            ValueError: scales that are missing, or not of tensor, channels or blocks.
        """
        # NVFP4's scales are in e4m3, too.
        if name not in files.tensors or files.tensors[name].dtype != E4M3 or name.endswith("_scale"):
            return None
        module, file = name.removesuffix("weight"), files.tensors[name].file
        if not name.endswith(_LINEAR):
            raise ValueError(f"{name} in {file} is in FP8; only linear layers of decoder layers may be")
        scales = [f"{module}{scale}" for scale in _SCALES if f"{module}{scale}" in files.tensors]
        if len(scales) != 1:
            raise ValueError(
                f"{name} in {file} is in FP8: expected {module}weight_scale or {module}weight_scale_inv beside"
            )
        scale_shape, expected = files.tensors[scales[0]].shape, _scale_shapes(shape)
        if scale_shape not in expected:
            raise ValueError(
                f"{scales[0]} in {file} is {list(scale_shape)}, expected one of {', '.join(map(str, expected))}"
            )
        shapes = {name: shape, scales[0]: scale_shape}
        if (static := f"{module}{_ACTIVATION_SCALE}") in files.tensors:
            shapes[static] = files.tensors[static].shape
        return Stored(shapes, lambda files: _read(files, name, scales[0]))

    def ignores(self, name: str) -> bool:
        """Return whether a tensor is the scale of attention's values in a quantized key/value cache."""
        return _CACHE_SCALE.fullmatch(name) is not None


class TrainedFP8Format(WeightFormat):
    """Weights in the model's dtype that train, rounded to FP8 for each product."""

    name, label, flag, description = "fp8_trained", "fp8", "--matmul fp8", "multiplied in fp8 (e4m3)"
    trains, fp8 = True, True

    def quantize(self, matrix: Float[Array, "out in"]) -> Any:
        """Return the matrix."""
        return matrix


def _holds_floats(config: Mapping[str, Any]) -> bool:
    """Return whether all groups in `config_groups` have weights of floating-point numbers."""
    groups = config.get("config_groups") or {}
    listed = groups.values() if isinstance(groups, Mapping) else [groups]
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in listed]
    return all(isinstance(each, Mapping) and each.get("type") == "float" for each in weights)


def _scale_shapes(shape: Shape) -> list[Shape]:
    """Return the shapes of scales of a tensor, of its channels, and of its blocks."""
    out, columns = shape
    return [(), (1,), (out,), (out, 1), (-(-out // BLOCK), -(-columns // BLOCK))]


def _read(files: TensorReader, name: str, scale: str) -> FP8Weight:
    values, scales = files.read(name), files.read(scale).astype(np.float32)
    out = len(values)
    if scales.size == 1 or scales.shape in ((out,), (out, 1)):
        rows = np.broadcast_to(scales.reshape(-1), (out,)).copy()
    else:
        rows = np.repeat(scales, BLOCK, axis=0)[:out]
    return FP8Weight(values=values, scales=rows, dtype=jnp.dtype(jnp.bfloat16), expand=True)  # type: ignore[arg-type]


for _made in (FP8Format(), StoredFP8Format(), TrainedFP8Format()):
    register(_made)
