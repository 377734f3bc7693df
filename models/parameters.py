"""A model's parameters as plain trees: trainable and frozen apart, named as Hugging Face names them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxglue.models.decoder import CausalLM
from jaxglue.ops.quant.formats import Quantized, is_quantized

Params = dict[str, Any]
"""Nested dicts of arrays with the modules' names; `layers` is a list of such dicts."""


ParamKey = str | int
"""Where a part stands in a parameter tree: its name, or the index of a layer."""


@dataclass(frozen=True, kw_only=True)
class ModelGraphDefs:
    """The modules without their parameters; equal layers have equal (and hashable) structures."""

    embed_tokens: nnx.GraphDef
    layers: tuple[nnx.GraphDef, ...]
    norm: nnx.GraphDef
    lm_head: nnx.GraphDef | None
    """None when the output projection is tied to the embedding."""

    @property
    def output(self) -> nnx.GraphDef:
        """The module that holds the output projection."""
        return self.embed_tokens if self.lm_head is None else self.lm_head


_EXPERT_PARAMETER = re.compile(r"(\.experts\.\w+)\.(weight|bias|blocks|scales)$")


def split_model(model: CausalLM, trainable: nnx.filterlib.Filter) -> tuple[ModelGraphDefs, Params, Params]:
    """(graphdefs, trainable, frozen): both trees have the keys embed_tokens, layers, norm and, if untied, lm_head.

    Args:
        model: the modules with their parameters.
        trainable: which variables train: `nnx.LoRAParam` for adapters, `nnx.Param` for everything.
    """
    modules: dict[str, Any] = {"embed_tokens": model.embed_tokens, "norm": model.norm}
    if model.lm_head is not None:
        modules["lm_head"] = model.lm_head
    graphs: dict[str, Any] = {"lm_head": None}
    train: Params = {}
    frozen: Params = {}
    for name, module in modules.items():
        graphs[name], train[name], frozen[name] = _split(module, trainable)
    layers = [_split(layer, trainable) for layer in model.layers]
    train["layers"], frozen["layers"] = [layer[1] for layer in layers], [layer[2] for layer in layers]
    return ModelGraphDefs(layers=tuple(layer[0] for layer in layers), **graphs), train, frozen


def _split(module: nnx.Module, trainable) -> tuple[nnx.GraphDef, Params, Params]:
    graph, *states = nnx.split(module, trainable, ...)
    train, frozen = map(nnx.to_pure_dict, states)
    return graph, train, frozen


def get_part(tree: Params, key: ParamKey) -> Params:
    """The part of a parameter tree at a place."""
    return tree["layers"][key] if isinstance(key, int) else tree[key]


def set_part(tree: Params, key: ParamKey, part: Params) -> None:
    """Puts a part at its place, in the tree itself."""
    if isinstance(key, int):
        tree["layers"][key] = part
    else:
        tree[key] = part


def merge_module(graph: nnx.GraphDef, *trees: Params) -> Any:
    """The module with the parameters of its plain trees; for use inside jit."""
    first, *others = map(nnx.State, trees)
    return nnx.merge(graph, first, *others)


def flatten_names(tree: Params) -> dict[str, jax.Array]:
    """Hugging Face's full name → parameter, in the tree's order; each part of a quantized one has its own name."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {hf_name(jax.tree_util.keystr(path, simple=True, separator=".")): leaf for path, leaf in flat}


def hf_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of a parameter at this path of ours.

    An expert's projection is a parameter there, not a module: `experts.down_proj.weight` is `experts.down_proj`, and
    `experts.down_proj.bias` is `experts.down_proj_bias`.
    """
    name = _EXPERT_PARAMETER.sub(lambda match: match[1] + ("" if match[2] == "weight" else f"_{match[2]}"), name)
    return name if name.startswith("lm_head") else f"model.{name}"


def quantized_names(model: CausalLM) -> set[str]:
    """Hugging Face's names of the parameters that a model holds quantized."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {_dotted(path) for path, variable in flat if is_quantized(variable.get_value())}


def set_parameters(model: CausalLM, parameters: Mapping[str, jax.Array | Quantized]) -> CausalLM:
    """The model with its variables replaced by the arrays of these Hugging Face names, all of which it must have."""
    graph, state = nnx.split(model)
    flat = [(path, variable.replace(parameters[_dotted(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def abstract_parameters(model: CausalLM) -> dict[str, jax.ShapeDtypeStruct]:
    """Hugging Face's name → shape and dtype of every parameter of a model, which may be abstract itself.

    Those of a quantized parameter are the original's.
    """
    flat = nnx.to_flat_state(nnx.state(model))
    return {_dotted(path): jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in flat}


def _dotted(path: tuple) -> str:
    return hf_name(".".join(map(str, path)))
