"""A model's parameters as plain trees, trainable and frozen apart, under Hugging Face's names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxglue.models.decoder import CausalLM
from jaxglue.ops.quant.formats import Quantized, is_quantized

Params = dict[str, Any]
"""Nested dicts of arrays under the modules' names; `layers` is a list of such dicts."""

ParamKey = str | int
"""Key of a part of a parameter tree: a module's name, or a layer's index."""


HEADS = ("score", "lm_head")
"""Modules after the final norm; a model has one of them, or its embedding serves as output projection."""


@dataclass(frozen=True, kw_only=True)
class ModelGraphDefs:
    """`nnx.GraphDef`s of the modules; layers of one type have equal ones."""

    embed_tokens: nnx.GraphDef
    layers: tuple[nnx.GraphDef, ...]
    norm: nnx.GraphDef
    lm_head: nnx.GraphDef | None
    """None when the output projection is tied to the embedding."""
    score: nnx.GraphDef | None = None
    """Score of a reward model, in place of the output projection."""

    @property
    def output_name(self) -> str:
        """Return the key of the output projection, or of a reward model's score."""
        return next((name for name in HEADS if getattr(self, name) is not None), "embed_tokens")

    @property
    def output(self) -> nnx.GraphDef:
        """Return the graphdef of the module of `output_name`."""
        return getattr(self, self.output_name)


VISION = "embed_tokens.vision."
"""Beginning of the names of a vision tower, which is in the embedding's module here, and beside it there."""
_PER_LAYER = "embed_tokens.per_layer."
_PER_LAYER_NAMES = {
    "embedding.weight": "embed_tokens_per_layer.weight",
    "projection.weight": "per_layer_model_projection.weight",
    "norm.weight": "per_layer_projection_norm.weight",
}
"""Names of what is in the embedding's module here, and beside it there."""
PER_LAYER_TABLE = "model.embed_tokens_per_layer.weight"
"""The table of embeddings for each layer."""
_EXPERT_PARAMETER = re.compile(r"(\.experts\.\w+)\.(?!lora_)(\w+)$")


def split_model(model: CausalLM, trainable: nnx.filterlib.Filter) -> tuple[ModelGraphDefs, Params, Params]:
    """Return (graphdefs, trainable, frozen); trees have the keys embed_tokens, layers, norm and one of `HEADS`, if any.

    Args:
        model: modules with parameters.
        trainable: filter of the variables that train: `nnx.LoRAParam` for adapters, `nnx.Param` for everything.
    """
    modules: dict[str, Any] = {"embed_tokens": model.embed_tokens, "norm": model.norm}
    modules |= {name: head for name in HEADS if (head := getattr(model, name)) is not None}
    graphdefs: dict[str, Any] = {"lm_head": None}
    train: Params = {}
    frozen: Params = {}
    for name, module in modules.items():
        graphdefs[name], train[name], frozen[name] = _split(module, trainable)
    layers = [_split(layer, trainable) for layer in model.layers]
    train["layers"], frozen["layers"] = [layer[1] for layer in layers], [layer[2] for layer in layers]
    return ModelGraphDefs(layers=tuple(layer[0] for layer in layers), **graphdefs), train, frozen


def _split(module: nnx.Module, trainable) -> tuple[nnx.GraphDef, Params, Params]:
    graphdef, *states = nnx.split(module, trainable, ...)
    train, frozen = map(nnx.to_pure_dict, states)
    return graphdef, train, frozen


def get_part(tree: Params, key: ParamKey) -> Params:
    """Return a part of a parameter tree."""
    return tree["layers"][key] if isinstance(key, int) else tree[key]


def set_part(tree: Params, key: ParamKey, part: Params) -> None:
    """Set a part of a parameter tree in place."""
    if isinstance(key, int):
        tree["layers"][key] = part
    else:
        tree[key] = part


def without_parts(tree: Params) -> Params:
    """Return a parameter tree with None in place of each part."""
    return {**dict.fromkeys(tree), "layers": [None] * len(tree["layers"])}


def merge_module(graphdef: nnx.GraphDef, *trees: Params) -> Any:
    """Build a module from its graphdef and plain parameter trees; for use inside jit."""
    first, *others = map(nnx.State, trees)
    return nnx.merge(graphdef, first, *others)


def flatten_names(tree: Params) -> dict[str, jax.Array]:
    """Map Hugging Face's names to arrays, in the tree's order; a quantized parameter has one name per array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {hf_name(jax.tree_util.keystr(path, simple=True, separator=".")): leaf for path, leaf in flat}


def part_name(key: ParamKey, path: str) -> str:
    """Return the Hugging Face name of a parameter at a dotted path within a part."""
    return hf_name(f"layers.{key}.{path}" if isinstance(key, int) else f"{key}.{path}")


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a parameter at a dotted path.

    Experts' projections are parameters there, not modules: `experts.down_proj.weight` is `experts.down_proj`, and
    `experts.down_proj.bias` is `experts.down_proj_bias`.
    """
    if name.startswith(VISION):
        return f"model.{name.removeprefix(VISION)}"
    if name.startswith(_PER_LAYER):
        name = _PER_LAYER_NAMES[name.removeprefix(_PER_LAYER)]
    name = _EXPERT_PARAMETER.sub(lambda match: match[1] + ("" if match[2] == "weight" else f"_{match[2]}"), name)
    return name if name.startswith(HEADS) else f"model.{name}"


def quantized_names(model: CausalLM) -> set[str]:
    """Return the Hugging Face names of a model's quantized parameters."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {_dotted(path) for path, variable in flat if is_quantized(variable.get_value())}


def set_parameters(model: CausalLM, parameters: Mapping[str, jax.Array | Quantized]) -> CausalLM:
    """Return the model with every variable replaced by the array of its Hugging Face name."""
    graphdef, state = nnx.split(model)
    flat = [(path, variable.replace(parameters[_dotted(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def abstract_parameters(model: CausalLM) -> dict[str, jax.ShapeDtypeStruct]:
    """Map Hugging Face's names to shapes and dtypes; quantized parameters have those of the original.

    The model may be abstract.
    """
    flat = nnx.to_flat_state(nnx.state(model))
    return {_dotted(path): jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in flat}


class Buffer(nnx.Variable):
    """A value that is stored and does not train."""


def buffers(model: CausalLM) -> dict[str, jax.ShapeDtypeStruct]:
    """Map Hugging Face's names of the model's buffers to shapes and dtypes; the model may be abstract."""
    flat = nnx.to_flat_state(nnx.state(model, Buffer))
    return {_dotted(path): jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in flat}


def _dotted(path: tuple) -> str:
    return hf_name(".".join(map(str, path)))
