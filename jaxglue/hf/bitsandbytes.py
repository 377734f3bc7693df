"""Quantized linear layers in bitsandbytes' folder format, shared with transformers.

An NF4 matrix is six tensors: `weight` (codes), two levels of scales, a code table per level, and a JSON text with sizes
and the scales' mean, as bytes. An int8 matrix is `weight`, `SCB` (largest magnitude per row) and `weight_format`
(0: row-major). Source: bitsandbytes' `QuantState.as_dict` and `Linear8bitLt`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.json_file import parse_object
from jaxglue.ops.quant.blocks import dynamic_code
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.int8 import Int8Weight
from jaxglue.ops.quant.nf4 import BLOCK, GROUP, NF4, VALUES

Specs = dict[str, jax.ShapeDtypeStruct]

_STATE = "quant_state.bitsandbytes__nf4"
_STATE_BYTES = 256
"""Size of the space-padded JSON text: fixed, so that tensor sizes are known before quantization."""
_REQUANTIZE = "quantize the original model again (jaxglue export --quantize)"


def stored_specs(name: str, shape: tuple[int, ...], how: str) -> Specs:
    """Return the stored tensors' shapes and dtypes for a matrix [out, in] named `….weight`, in NF4 or int8."""
    out, columns = shape
    if how == "int8":
        module = name.removesuffix("weight")
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.int8),
            f"{module}SCB": jax.ShapeDtypeStruct((out,), jnp.float32),
            f"{module}weight_format": jax.ShapeDtypeStruct((), jnp.uint8),
        }
    blocks = out * columns // BLOCK
    return {
        name: jax.ShapeDtypeStruct((blocks * BLOCK // 2, 1), jnp.uint8),
        f"{name}.absmax": jax.ShapeDtypeStruct((blocks,), jnp.uint8),
        f"{name}.quant_map": jax.ShapeDtypeStruct((len(VALUES),), jnp.float32),
        f"{name}.nested_absmax": jax.ShapeDtypeStruct((-(-blocks // GROUP),), jnp.float32),
        f"{name}.nested_quant_map": jax.ShapeDtypeStruct((256,), jnp.float32),
        f"{name}.{_STATE}": jax.ShapeDtypeStruct((_STATE_BYTES,), jnp.uint8),
    }


def stored_tensors(name: str, weight: NF4 | Int8Weight) -> dict[str, np.ndarray]:
    """Return the stored tensors of a quantized matrix, as `stored_specs` describes them."""
    if isinstance(weight, Int8Weight):
        parts = [weight.codes, weight.absmax, np.uint8(0)]
    else:
        state = _state(weight).encode().ljust(_STATE_BYTES)
        tables = np.array(VALUES, np.float32), dynamic_code()
        parts = [weight.codes, weight.scales, tables[0], weight.scale_absmax, tables[1], np.frombuffer(state, np.uint8)]
    specs = stored_specs(name, weight.shape, "int8" if isinstance(weight, Int8Weight) else "nf4")
    return {part: np.asarray(array).reshape(specs[part].shape) for part, array in zip(specs, parts, strict=True)}


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


def find_quantized(
    files: TensorFiles, name: str, shape: tuple[int, ...]
) -> tuple[dict[str, tuple[int, ...]], Callable[[TensorFiles], Quantized]] | None:
    """Return (stored tensors' shapes, reader) of a quantized matrix; None if the files do not quantize it."""
    module = name.removesuffix("weight")
    if f"{name}.{_STATE}" in files.tensors:
        shapes = {part: spec.shape for part, spec in stored_specs(name, shape, "nf4").items()}
        shapes[f"{name}.{_STATE}"] = files.tensors[f"{name}.{_STATE}"].shape
        return shapes, lambda files: _read_nf4(files, name, shape)
    if f"{module}SCB" in files.tensors:
        shapes = {part: spec.shape for part, spec in stored_specs(name, shape, "int8").items()}
        if f"{module}weight_format" not in files.tensors:
            del shapes[f"{module}weight_format"]
        return shapes, lambda files: _read_int8(files, name)
    return None


def _read_nf4(files: TensorFiles, name: str, shape: tuple[int, ...]) -> NF4:
    """Read an NF4 matrix; raise ValueError unless state and tables are those of double-quantized NF4."""
    out, columns = shape
    try:
        state = parse_object(files.read(f"{name}.{_STATE}").tobytes(), "the tensor")
        offset = np.float32(state["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(files, name, f"its quant_state cannot be read ({error})") from error
    expected = {"quant_type": "nf4", "blocksize": BLOCK, "shape": [out, columns], "nested_blocksize": GROUP}
    if wrong := {key: state.get(key) for key, value in expected.items() if state.get(key) != value}:
        raise _refused(files, name, f"its quant_state says {wrong}, expected {expected}")
    for table, values in (("quant_map", np.array(VALUES, np.float32)), ("nested_quant_map", dynamic_code())):
        if not np.array_equal(files.read(f"{name}.{table}"), values):
            raise _refused(files, name, f"its {table} differs from bitsandbytes'")
    parts: dict[str, Any] = {
        "codes": _typed(files, name, np.uint8).reshape(out, columns // 2),
        "scales": _typed(files, f"{name}.absmax", np.uint8).reshape(out, columns // BLOCK),
        "scale_absmax": _typed(files, f"{name}.nested_absmax", np.float32),
        "scale_offset": offset,
    }
    return NF4(**parts, dtype=jnp.dtype(state.get("dtype", "bfloat16")))


def _read_int8(files: TensorFiles, name: str) -> Int8Weight:
    module = name.removesuffix("weight")
    if f"{module}weight_format" in files.tensors and int(files.read(f"{module}weight_format")) != 0:
        raise _refused(files, name, "its weight_format is not row-major (0)")
    parts: dict[str, Any] = {"codes": _typed(files, name, np.int8), "absmax": _typed(files, f"{module}SCB", np.float32)}
    return Int8Weight(**parts, dtype=jnp.dtype(jnp.float16))


def _typed(files: TensorFiles, name: str, dtype: type[np.generic]) -> np.ndarray:
    if (found := files.tensors[name].dtype) != dtype:
        raise _refused(files, name, f"its dtype is {found}, expected {np.dtype(dtype)}")
    return files.read(name)


def _refused(files: TensorFiles, name: str, why: str) -> ValueError:
    return ValueError(f"{name} in {files.tensors[name].file}: {why}: copy the file again, or {_REQUANTIZE}")


def quantization_config(how: str, *, scores: bool = False) -> dict[str, Any]:
    """Return bitsandbytes' `quantization_config` for config.json, of a reward model where it `scores`."""
    shared: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": how == "nf4",
        "load_in_8bit": how == "int8",
        "llm_int8_skip_modules": ["score" if scores else "lm_head"],
    }
    if how == "int8":
        return shared | {"llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}
    return shared | {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
    }


class QuantizedReader:
    """Reader of a quantized folder's tensors that quantizes each matrix when its first part is read.

    Holds the unread parts, at most one shard's worth.
    """

    def __init__(
        self, quantize: Callable[[str], NF4 | Int8Weight], parts: Mapping[str, str], read: Callable[[str], Any]
    ):
        """Take `parts`, from stored tensor to matrix name, and `read` for all other tensors."""
        self._quantize, self._parts, self._read = quantize, parts, read
        self._ready: dict[str, np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray:
        """Return the named tensor; each part of a matrix can be read once."""
        if name not in self._parts:
            return self._read(name)
        if name not in self._ready:
            matrix = self._parts[name]
            self._ready |= stored_tensors(matrix, self._quantize(matrix))
        return self._ready.pop(name)
