"""Expert layouts in checkpoints: one tensor, one tensor per expert, or MXFP4 blocks."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models import FAMILIES
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, Quantized, Stored, WeightFormat, experts_format, find_stored, format_of
from jaxglue.ops.quant.stack import Stack

Index = tuple[int | slice, ...]
ExpertIndex = tuple[int, slice]
Shape = tuple[int, ...]

_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>gate_up_proj|up_proj|down_proj)")
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True, kw_only=True)
class ParameterSource:
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


def find_source(files: TensorFiles, name: str, shape: Shape) -> ParameterSource:
    """Return how to read a parameter from the files, in whichever layout they hold it."""
    if stored := find_stored(files, name, shape):
        return ParameterSource(shapes=stored.shapes, read=stored.read, packed=True)
    if name not in files.tensors:
        if made := experts_format(files.tensors, name):
            return _expanded(made, name, shape)
        parts = expert_parts(name, shape)
        if any(
            tensor in files.tensors or find_stored(files, tensor, part_shape(shape, index))
            for tensor, index in islice(parts.items(), 1)
        ):
            return _stacked(files, parts, shape)
    return ParameterSource(
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
    family = FAMILIES.get(str(config.get("model_type")))
    splits = family is not None and family.parts.experts.stored != "together"
    layout: dict[str, tuple[str, Index]] = {}
    for parameter, shape in shapes.items():
        parts: Mapping[str, Index] = expert_parts(parameter, shape) if splits else {}
        layout |= {name: (parameter, index) for name, index in (parts or {parameter: ()}).items()}
    return layout


def _stacked(files: TensorFiles, parts: dict[str, ExpertIndex], shape: Shape) -> ParameterSource:
    shapes = {tensor: part_shape(shape, index) for tensor, index in parts.items()}
    quantized = {tensor: found for tensor in parts if (found := find_stored(files, tensor, shapes[tensor]))}
    if quantized:
        return _stacked_quantized(files, quantized, parts, shapes, shape)

    def read_rows(files: TensorFiles, start: int, stop: int) -> np.ndarray:
        stack = np.empty((stop - start, *shape[1:]), files.tensors[next(iter(parts))].dtype)
        for tensor, (expert, rows) in parts.items():
            if start <= expert < stop:
                stack[expert - start, rows] = files.read(tensor)
        return stack

    return ParameterSource(shapes=shapes, read=lambda files: read_rows(files, 0, shape[0]), read_rows=read_rows)


def _stacked_quantized(
    files: TensorFiles,
    quantized: Mapping[str, Stored],
    parts: dict[str, ExpertIndex],
    shapes: dict[str, Shape],
    shape: Shape,
) -> ParameterSource:
    """Return how to read experts, quantized one by one, as a `Stack` on the default device, or some as bfloat16."""
    if others := [tensor for tensor in parts if tensor in files.tensors and tensor not in quantized]:
        info, one = files.tensors[others[0]], next(iter(quantized.values())).read(files)
        label = format_of(one).label.upper()
        raise ValueError(
            f"{others[0]} in {info.file} is {info.dtype}, but other experts are in {label}: store all alike"
        )

    def read_stack(files: TensorFiles, start: int, stop: int) -> Stack:
        within = sorted(
            (expert, rows.start, tensor) for tensor, (expert, rows) in parts.items() if start <= expert < stop
        )
        matrices = [quantized[tensor].read(files) for *_, tensor in within]
        made = format_of(matrices[0])
        if not made.row_wise:
            raise ValueError(f"{within[0][2]} is in {made.label}, which is not read for experts one by one")
        # One product on the device instead of one for each expert.
        rows = jax.tree.map(lambda *arrays: jax.device_put(np.concatenate(arrays)), *matrices)
        return Stack(rows=rows, out=shape[1])

    def read_rows(files: TensorFiles, start: int, stop: int) -> jax.Array:
        return expand(read_stack(files, start, stop), jnp.bfloat16)

    shapes = {tensor: shape for tensor, shape in shapes.items() if tensor not in quantized}
    for found in quantized.values():
        shapes |= found.shapes
    return ParameterSource(
        shapes=shapes, read=lambda files: read_stack(files, 0, shape[0]), read_rows=read_rows, packed=True
    )


def expand(experts: Any, dtype) -> Any:
    """Return a folder's experts as an array; those in FP8 or NVFP4 are rounded to bfloat16."""
    return dequantize(experts, jnp.bfloat16).astype(dtype) if isinstance(experts, Stack) else experts


def part_shape(shape: Shape, index: Index) -> Shape:
    """Return the shape of an indexed part of an array."""
    return np.broadcast_to(0, shape)[index].shape


def _expanded(made: WeightFormat, name: str, shape: Shape) -> ParameterSource:
    """Return how to read experts [E, in, out] from the parts of [E, out, in]."""
    E, in_features, out_features = shape
    shapes = {f"{name}_{part}": spec.shape for part, spec in made.part_specs((E, out_features, in_features)).items()}

    def read_rows(files: TensorFiles, start: int, stop: int) -> jax.Array:
        return _expand({part: files.read_rows(f"{name}_{part}", start, stop) for part in made.parts}, made.name)

    read = partial(read_expanded, made=made, name=name)
    return ParameterSource(shapes=shapes, read=read, read_rows=read_rows, packed=True)


def read_expanded(files: TensorFiles, made: WeightFormat, name: str) -> jax.Array:
    """Expand the parts of the named parameter to experts [E, in, out] in bfloat16, on the default device."""
    return _expand({part: files.read(f"{name}_{part}") for part in made.parts}, made.name)


@partial(jax.jit, static_argnames="how")
def _expand(parts, how: str) -> jax.Array:
    return FORMATS[how].join(parts).dequantize(jnp.bfloat16).mT
