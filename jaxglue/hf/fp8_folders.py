"""Linear layers in FP8 as model folders on the hub hold them, without another rounding.

Each is e4m3 codes and their scales: `weight_scale` of a tensor or of output channels (compressed-tensors'
`float-quantized`), or of blocks of 128 × 128; or `weight_scale_inv` of such blocks (DeepSeek, Qwen). Both multiply the
codes. Scales of activations are ignored, since activations are quantized by token, and those of a key/value cache.
"""

import re
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.ops.quant.fp8 import BLOCK, E4M3, FP8Weight

_SCALES = ("weight_scale", "weight_scale_inv")
_ACTIVATION_SCALE = "input_scale"
_CACHE_SCALE = re.compile(r".*\.self_attn\.([kv]_proj\.(output|[kv])_scale|(q|k|v|kv|prob)_scale)")
FP8Source = tuple[dict[str, tuple[int, ...]], Callable[[TensorFiles], FP8Weight]]
"""Stored tensors' shapes, and the reader of the matrix."""


def find_fp8(files: TensorFiles, name: str, shape: tuple[int, ...]) -> FP8Source | None:
    """Return (stored tensors' shapes, reader) of a matrix in e4m3; None if the files do not hold it so.

    Raises:
        ValueError: scales that are missing, or not of tensor, channels or blocks.
    """
    if files.tensors[name].dtype != E4M3:
        return None
    module, file = name.removesuffix("weight"), files.tensors[name].file
    if not name.endswith("_proj.weight"):
        raise ValueError(f"{name} in {file} is in FP8; only linear layers of decoder layers may be")
    scales = [f"{module}{scale}" for scale in _SCALES if f"{module}{scale}" in files.tensors]
    if len(scales) != 1:
        raise ValueError(
            f"{name} in {file} is in FP8: expected {module}weight_scale or {module}weight_scale_inv beside"
        )
    found, expected = files.tensors[scales[0]].shape, _scale_shapes(shape)
    if found not in expected:
        raise ValueError(f"{scales[0]} in {file} is {list(found)}, expected one of {', '.join(map(str, expected))}")
    shapes = {name: shape, scales[0]: found}
    if (static := f"{module}{_ACTIVATION_SCALE}") in files.tensors:
        shapes[static] = files.tensors[static].shape
    return shapes, lambda files: _read(files, name, scales[0])


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor is the scale of attention's values in a quantized key/value cache."""
    return _CACHE_SCALE.fullmatch(name) is not None


def require_fp8(files: TensorFiles, names: Iterable[str]) -> None:
    """Raise ValueError for linear layers of a folder in FP8 that are not, as they would be rounded unasked."""
    for name in names:
        if name in files.tensors and (info := files.tensors[name]).dtype != E4M3:
            raise ValueError(
                f"{name} in {info.file} is {info.dtype}, and the folder's other linear layers are in FP8, which is not "
                "supported: round it too with --matmul fp8, or use the original model folder"
            )


def _scale_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes of scales of a tensor, of its channels, and of its blocks."""
    out, columns = shape
    return [(), (1,), (out,), (out, 1), (-(-out // BLOCK), -(-columns // BLOCK))]


def _read(files: TensorFiles, name: str, scale: str) -> FP8Weight:
    codes, scales = files.read(name), files.read(scale).astype(np.float32)
    out = len(codes)
    if scales.size == 1 or scales.shape in ((out,), (out, 1)):
        rows = np.broadcast_to(scales.reshape(-1), (out,)).copy()
    else:
        rows = np.repeat(scales, BLOCK, axis=0)[:out]
    return FP8Weight(codes=codes, scales=rows, dtype=jnp.dtype(jnp.bfloat16), expand=True)  # type: ignore[arg-type]
