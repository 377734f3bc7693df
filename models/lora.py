"""Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers and experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxglue.models.decoder import CausalLM
from jaxglue.models.linear import Linear
from jaxglue.models.lora_config import (
    ALL_LINEAR,
    EXPERTS,
    PATHS,
    LoraConfig,
    is_excluded,
    is_target,
    match_pattern,
    parse_patterns,
)
from jaxglue.models.moe_layers import ExpertLinear
from jaxglue.models.parameters import Params, merge_module
from jaxglue.models.vocabulary import adapt_vocabulary, train_modules, train_rows, train_score, vocabulary_modules
from jaxglue.ops.choices import STORED
from jaxglue.ops.projection.dora import magnitude_gain
from jaxglue.ops.projection.served import are_served, merge, merge_experts
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.ops.quant.served import Served, ServedStored
from jaxglue.ops.quant.stack import Stack
from jaxglue.settings.spelling import nearest

_LAYERS = "model.layers."


def add_lora(model: CausalLM, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Add an adapter in place to every targeted linear layer and expert projection of the decoder layers.

    Embedding and output projection get adapters where targets name them; they, or rows of them, train beside the
    adapters where the configuration says so, and always the score of a reward model.

    Raises:
        ValueError: a target or pattern that names none of them, dropout or DoRA on experts, or a token index
            outside the vocabulary.
    """
    linears = dict(linear_layers(model))
    if model.config.vision is not None and model.config.vision.trains == "all":
        linears |= dict(vision_layers(model))
    _check_names(config, list(linears))
    for path, linear in linears.items():
        if not _is_adapted(path, config):
            continue
        rank, scale, kind = config.rank_of(path), config.scale_of(path), path.rpartition(".")[-1]
        options: dict[str, Any] = {
            "rank": rank,
            "scale": scale,
            "dropout": config.dropout or 0.0,
            "name": kind,
            "rngs": rngs,
        }
        if not config.dora:
            linear.add_lora(**options)
        elif isinstance(linear, ExpertLinear):
            raise ValueError(f"--dora is not supported for the adapters of experts ({path}): name other --targets")
        else:
            linear.add_lora(**options, dora=True)
    adapt_vocabulary(model, config, rngs=rngs)
    train_projector(model)
    train_score(model)
    train_modules(model, config.modules_to_save)
    train_rows(model, config.token_modules, config.trainable_token_indices)


def _is_adapted(path: str, config: LoraConfig) -> bool:
    """Tell whether the linear layer of this path gets an adapter."""
    if config.layers and path.startswith(_LAYERS) and int(path.split(".")[2]) not in config.layers:
        return False
    if any(is_excluded(path, name) for name in config.exclude):
        return False
    return any(target == ALL_LINEAR or is_target(path, target) for target in config.targets)


def merge_served(model: CausalLM) -> None:
    """Merge in place the adapters of weights that are rounded as they are served.

    Values of weights in 16 bits stay in their dtype, and those of a folder in the format go back into it.
    """
    label, config = FORMATS[model.config.quantize].label, model.config
    for _, linear in linear_layers(model):
        if isinstance(linear, Linear) and isinstance(linear.weight.get_value(), Served):
            matrix = _merged(linear)
            linear.weight, linear.storage = nnx.Param(matrix), label if is_quantized(matrix) else "none"
            linear.lora_magnitude_vector = nnx.data(None)
        elif isinstance(linear, ExpertLinear) and are_served(linear.projection.weight):
            linear.quantize = _merge_experts(linear, label)
        else:
            continue
        linear.lora_A = linear.lora_B = nnx.data(None)
    stored = config.quantize in STORED.values()
    moe = config.moe and replace(config.moe, quantize=label if stored or label == "mxfp4" else "none")
    model.config = replace(config, quantize=label if stored else "none", moe=moe)


def _merged(linear: Linear) -> Any:
    served, adapter = linear.weight.get_value(), linear.adapter
    assert isinstance(served, Served)
    gain = None
    if adapter is not None and adapter.magnitude is not None:
        gain = magnitude_gain(served, adapter.A, adapter.up, adapter.magnitude, dtype=jnp.float32)
    if isinstance(served, ServedStored):
        delta = None if adapter is None else jnp.matmul(adapter.up, adapter.A, precision="highest")
        return served.pack(served.codes(delta, gain))
    if adapter is None:
        return served.dequantize(served.dtype)
    return merge(served, adapter.A, adapter.up, served.dtype, gain)


def _merge_experts(linear: ExpertLinear, label: str) -> str:
    """Merge experts' adapters in place and return the format of the matrices."""
    weight, _, adapter = linear.projection
    assert are_served(weight)
    scaled = None if adapter is None else (adapter.A, linear.lora_scale * adapter.B)
    if not isinstance(weight.rows, ServedStored):
        dtype = weight.dtype
        merged = dequantize(weight, dtype) if scaled is None else merge_experts(weight, *scaled, dtype)
        linear.weight = nnx.Param(merged)
        return "none"
    delta = None
    if scaled is not None:
        delta = jnp.matmul(scaled[1], scaled[0], precision="highest").reshape(weight.rows.shape)
    packed = weight.rows.pack(weight.rows.codes(delta))
    if linear.weight is not None:
        linear.weight = nnx.Param(Stack(rows=packed, out=weight.out))
        return label
    for part in FORMATS[label].parts:
        own = getattr(linear, part)
        setattr(linear, part, nnx.Param(getattr(packed, part).reshape(own.get_value().shape)))
    return label


def without_adapters(graphdef: nnx.GraphDef, trainable: Params, frozen: Params) -> nnx.GraphDef:
    """Return the graphdef of a decoder layer with the frozen parameters alone."""
    layer = merge_module(graphdef, trainable, frozen)
    for _, module in nnx.iter_modules(layer):
        if isinstance(module, Linear | ExpertLinear):
            module.lora_A = module.lora_B = nnx.data(None)
            module.lora_scale = 0.0
        if isinstance(module, Linear):
            module.lora_magnitude_vector = nnx.data(None)
    return nnx.split(layer, nnx.LoRAParam, ...)[0]


def _check_names(config: LoraConfig, paths: list[str]) -> None:
    """Raise ValueError for a target, exclusion, layer or pattern that matches no path, or for no adapter at all."""
    kinds = sorted({path.rpartition(".")[-1] for path in paths})
    layers = 1 + max(int(path.split(".")[2]) for path in paths if path.startswith(_LAYERS))
    if absent := [index for index in config.layers if index >= layers]:
        raise ValueError(f"layers: the model has {layers} layers, 0 to {layers - 1}, and no layer {absent[0]}")
    if unknown := [
        name for name in config.exclude if not (name == EXPERTS or any(is_target(path, name) for path in paths))
    ]:
        raise ValueError(
            f"exclude: {', '.join(unknown)} do not exist in this model: use {', '.join(kinds)}"
            f"{nearest(unknown[0], kinds)}"
        )
    named, known = [target for target in config.targets if target != ALL_LINEAR], [*paths, *PATHS.values()]
    if unknown := [target for target in named if not any(is_target(path, target) for path in known)]:
        hint = nearest(unknown[0], [*kinds, ALL_LINEAR, *PATHS])
        raise ValueError(f"LoRA targets {', '.join(unknown)} do not exist in this model: use {', '.join(kinds)}{hint}")
    if not (config.vocabulary_targets or any(_is_adapted(path, config) for path in paths)):
        raise ValueError("exclude and layers leave no linear layer to adapt: name fewer, or other targets")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in parse_patterns(field, getattr(config, field)):
            if not any(match_pattern({pattern: 1}, path) for path in known):
                raise ValueError(f"{field}: {pattern} matches none of {', '.join(kinds)}{nearest(pattern, kinds)}")


def linear_layers(model: CausalLM) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Yield (path, module) of the decoder layers' linear layers and experts, in model order."""
    for index, layer in enumerate(model.layers):
        for path, module in nnx.iter_modules(layer):
            if isinstance(module, Linear | ExpertLinear):
                yield ".".join(["model", "layers", str(index), *map(str, path)]), module


def vision_layers(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """Yield (path, module) of the linear layers of a vision tower and its projector; none of a model without."""
    vision = model.embed_tokens.vision
    for path, module in () if vision is None else nnx.iter_modules(vision):
        if isinstance(module, Linear):
            yield ".".join(["model", *map(str, path)]), module


def train_projector(model: CausalLM) -> None:
    """Make the projector of a vision tower train whole beside adapters, in float32, in place, where it should."""
    config, vision = model.config.vision, model.embed_tokens.vision
    if config is None or vision is None or config.trains != "projector":
        return
    for path, module in nnx.iter_modules(vision):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param) and config.in_projector(".".join(map(str, (*path, name)))):
                setattr(module, name, nnx.LoRAParam(value.get_value().astype(jnp.float32)))


def linear_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shape [out, in], or [E, out, in], of each linear layer by path; the model may be abstract."""
    return {
        path: (linear.experts, linear.out_features, linear.in_features)
        if isinstance(linear, ExpertLinear)
        else tuple(linear.weight.get_value().shape)
        for path, linear in (*linear_layers(model), *vision_layers(model))
    }


def base_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return `linear_shapes`, and the shape [V, D] of the embedding and, unless tied to it, the output projection."""
    modules = vocabulary_modules(model)
    return linear_shapes(model) | {PATHS[name]: tuple(module.weight.get_value().shape) for name, module in modules}
