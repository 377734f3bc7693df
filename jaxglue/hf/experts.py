"""Expert layouts in checkpoints: one tensor, one tensor per expert, or MXFP4 blocks."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.hf.bitsandbytes import find_quantized
from jaxglue.hf.fp8_folders import FP8Source, find_fp8
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.fp8 import BLOCK as FP8_BLOCK
from jaxglue.ops.quant.fp8 import E4M3, FP8Weight, dequantize_fp8
from jaxglue.ops.quant.mxfp4 import BLOCK, MXFP4, dequantize_mxfp4

Index = tuple[int | slice, ...]
ExpertIndex = tuple[int, slice]
Shape = tuple[int, ...]

_EXPERTS = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)")
_SPLIT_EXPERTS = {"qwen3_moe"}
"""Model types whose checkpoints hold one tensor per expert."""
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Checkpoint tensors of a parameter, and how to read them."""

    shapes: dict[str, Shape]
    """Required shapes of the checkpoint tensors, by name."""
    read: Callable[[TensorFiles], np.ndarray | jax.Array | Quantized]
    read_rows: Callable[[TensorFiles, int, int], np.ndarray | jax.Array] | None = None
    """Reads rows start:stop of the first axis; None if the parameter must be read whole."""
    packed: bool = False
    """The tensors hold a quantized format's integers, not the values themselves."""

    def nbytes(self, files: TensorFiles) -> int:
        """Return the bytes of the tensors in these files."""
        infos = (files.tensors[name] for name in self.shapes)
        return sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)


def find_source(files: TensorFiles, name: str, shape: Shape) -> Source:
    """Return how to read a parameter from the files, in whichever layout they hold it."""
    if name not in files.tensors:
        if f"{name}_blocks" in files.tensors:
            return _expanded(name, shape)
        parts = expert_parts(name, shape)
        if parts and next(iter(parts)) in files.tensors:
            return _stacked(files, parts, shape)
    elif quantized := find_quantized(files, name, shape) or find_fp8(files, name, shape):
        return Source(shapes=quantized[0], read=quantized[1], packed=True)
    return Source(
        shapes={name: shape},
        read=lambda files: files.read(name),
        read_rows=lambda files, start, stop: files.read_rows(name, start, stop),
    )


def expert_parts(name: str, shape: Shape) -> dict[str, ExpertIndex]:
    """Map each per-expert tensor to its index in the stacked parameter [E, out, in]; empty for other parameters.

    Qwen3-MoE's checkpoints hold `experts.3.gate_proj.weight`; its modules in transformers 5 hold
    `experts.gate_up_proj`.
    """
    if not (match := _EXPERTS.fullmatch(name)):
        return {}
    halves = _HALVES[match["projection"]]
    rows = shape[1] // len(halves)
    return {
        f"{match['experts']}.{expert}.{half}.weight": (expert, slice(i * rows, (i + 1) * rows))
        for expert in range(shape[0])
        for i, half in enumerate(halves)
    }


def checkpoint_layout(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[str, Index]]:
    """Map each published checkpoint tensor to its (parameter, index), inverting `find_source`.

    Args:
        shapes: parameter shapes by name.
        config: the model's config.json.
    """
    splits = config.get("model_type") in _SPLIT_EXPERTS
    layout: dict[str, tuple[str, Index]] = {}
    for parameter, shape in shapes.items():
        parts: Mapping[str, Index] = expert_parts(parameter, shape) if splits else {}
        layout |= {name: (parameter, index) for name, index in (parts or {parameter: ()}).items()}
    return layout


def _stacked(files: TensorFiles, parts: dict[str, ExpertIndex], shape: Shape) -> Source:
    shapes = {tensor: part_shape(shape, index) for tensor, index in parts.items()}
    present = [tensor for tensor in parts if tensor in files.tensors]
    in_fp8 = {tensor: found for tensor in present if (found := find_fp8(files, tensor, shapes[tensor]))}
    if in_fp8:
        if others := [tensor for tensor in present if tensor not in in_fp8]:
            info = files.tensors[others[0]]
            raise ValueError(
                f"{others[0]} in {info.file} is {info.dtype}, but other experts are in FP8: store all alike"
            )
        return _stacked_fp8(in_fp8, parts, shapes, shape)

    def read_rows(files: TensorFiles, start: int, stop: int) -> np.ndarray:
        stack = np.empty((stop - start, *shape[1:]), files.tensors[next(iter(parts))].dtype)
        for tensor, (expert, rows) in parts.items():
            if start <= expert < stop:
                stack[expert - start, rows] = files.read(tensor)
        return stack

    return Source(shapes=shapes, read=lambda files: read_rows(files, 0, shape[0]), read_rows=read_rows)


def _stacked_fp8(
    in_fp8: dict[str, FP8Source], parts: dict[str, ExpertIndex], shapes: dict[str, Shape], shape: Shape
) -> Source:
    """Return how to read experts in FP8 as bfloat16, on the default device."""

    def read_rows(files: TensorFiles, start: int, stop: int) -> jax.Array:
        codes = np.empty((stop - start, *shape[1:]), E4M3)
        scales = np.empty((stop - start, shape[1], -(-shape[2] // FP8_BLOCK)), np.float32)
        for tensor, (expert, rows) in parts.items():
            if start <= expert < stop:
                weight = in_fp8[tensor][1](files)
                codes[expert - start, rows] = weight.codes
                scales[expert - start, rows] = weight.scales.reshape(len(weight.codes), -1)
        flat = {"codes": codes.reshape(-1, shape[2]), "scales": scales.reshape(-1, scales.shape[2])}
        weight = FP8Weight(**jax.device_put(flat), dtype=jnp.dtype(jnp.bfloat16))
        return dequantize_fp8(weight, jnp.bfloat16).reshape(codes.shape)

    for found, _ in in_fp8.values():
        shapes = shapes | found
    return Source(shapes=shapes, read=lambda files: read_rows(files, 0, shape[0]), read_rows=read_rows, packed=True)


def part_shape(shape: Shape, index: Index) -> Shape:
    """Return the shape of an indexed part of an array."""
    return np.broadcast_to(0, shape)[index].shape


def _expanded(name: str, shape: Shape) -> Source:
    E, in_features, out_features = shape
    scales = (E, out_features, in_features // BLOCK)
    shapes = {f"{name}_blocks": (*scales, BLOCK // 2), f"{name}_scales": scales}

    def read_rows(files: TensorFiles, start: int, stop: int) -> jax.Array:
        return _expand(*(files.read_rows(part, start, stop) for part in shapes))

    return Source(shapes=shapes, read=partial(read_expanded, name=name), read_rows=read_rows, packed=True)


def read_expanded(files: TensorFiles, name: str) -> jax.Array:
    """Expand `<name>_blocks` and `<name>_scales` to experts [E, in, out] in bfloat16, on the default device."""
    return _expand(files.read(f"{name}_blocks"), files.read(f"{name}_scales"))


@jax.jit
def _expand(blocks, scales) -> jax.Array:
    return dequantize_mxfp4(MXFP4(blocks=blocks, scales=scales), jnp.bfloat16).mT
