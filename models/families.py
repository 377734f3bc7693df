"""The library's families, and models built from their tables."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import CausalLM
from jaxglue.models.family import FAMILIES, Family, find_family, register
from jaxglue.models.hf_fields import NO_WINDOW, check_fields
from jaxglue.models.layers import DecoderLayer
from jaxglue.models.wrapper import WRAPPERS, find_wrapper, text_config

__all__ = ["FAMILIES", "Family", "abstract_model", "build_model", "config_from_hf", "register", "with_vision"]

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f"jaxglue.models.{_module.name}")  # a family's file registers it


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read the decoder's shape from a parsed config.json.

    Raises:
        ValueError: the model type, rope type or activation is not supported, or a field is missing, of another type or
            out of range.
    """
    check_fields(raw)
    _refuse_images(raw)
    text = text_config(raw)
    check_fields(text)
    config = find_family(text.get("model_type"), raw).config_from_hf(text)
    # Of Mistral, a window of null says so alone: published folders have it.
    says_none = text.get("sliding_window") is None and config.model_type != "mistral"
    if says_none and "sliding_attention" in (text.get("layer_types") or ()) and not any(config.layer_windows):
        raise ValueError(NO_WINDOW)
    wrapper = find_wrapper(raw)
    return config if wrapper is None else replace(config, wrapper=wrapper.model_type)


def with_vision(
    config: DecoderConfig, raw: Mapping[str, Any], *, hears: bool = False, **settings: Any
) -> DecoderConfig:
    """Return the architecture of a model that sees images.

    Args:
        config: of its text model.
        raw: the parsed config.json.
        hears: with the tower of clips of audio, too, where config.json has one that is read.
        settings: further fields of its `TowerConfig`.

    Raises:
        ValueError: a model without a vision tower, or with one that is not read.
    """
    wrapper = find_wrapper(raw)
    if wrapper is None or wrapper.tower is None or not isinstance(raw.get("vision_config"), Mapping):
        kinds = ", ".join(sorted(wrapper.model_type for wrapper in WRAPPERS.values() if wrapper.tower))
        raise ValueError(f"model_type {raw.get('model_type')!r:.60} sees no images here: models of {kinds} do")
    seeing = wrapper.tower(raw, config, settings)
    if not hears or wrapper.hearing is None or not isinstance(raw.get("audio_config"), Mapping):
        return seeing
    return wrapper.hearing(raw, seeing)


def _refuse_images(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown model around a text model that is supported by itself."""
    model_type, text = raw.get("model_type"), raw.get("text_config")
    inner = text.get("model_type", f"{model_type}_text") if isinstance(text, Mapping) else None
    if str(model_type) not in FAMILIES and find_wrapper(raw) is None and isinstance(inner, str) and inner in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has parts beside text, such as a vision tower, and is not supported: its text "
            f"model, {inner}, is; give a folder of that alone, or of one of {', '.join(WRAPPERS)}"
        )


def build_model(config: DecoderConfig, *, dtype=jnp.bfloat16, rngs: nnx.Rngs) -> CausalLM:
    """Build a model with random weights in `dtype`; `abstract_model` has shapes only."""
    return _build(config, find_family(config.model_type), dtype, rngs)


def abstract_model(config: DecoderConfig, *, dtype=jnp.bfloat16) -> CausalLM:
    """Build a model with shapes and dtypes for arrays: one layer of each kind, copied for the others."""
    kinds = sorted(set(config.first_of_kind))
    model = nnx.merge(*_abstract(config.with_layers(kinds), find_family(config.model_type), dtype))
    model.layers = nnx.List([nnx.clone(model.layers[kinds.index(first)]) for first in config.first_of_kind])
    model.config = config
    return model


@lru_cache(maxsize=16)  # a command asks for the same model several times
def _abstract(config: DecoderConfig, family: Family, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: _build(config, family, dtype, nnx.Rngs(0))))


def _build(config: DecoderConfig, family: Family, dtype, rngs: nnx.Rngs) -> CausalLM:
    parts, layer = family.parts, family.layer or DecoderLayer

    def make_layer(index: int) -> DecoderLayer:
        return layer(config, parts, config.layer_kinds[index], dtype=dtype, rngs=rngs)

    return CausalLM(config, parts, make_layer, dtype=dtype, rngs=rngs)
