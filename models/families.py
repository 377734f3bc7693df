"""Model families: read config.json, build a flax.nnx model."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxglue.models import gpt_oss, llama, qwen3, qwen3_moe
from jaxglue.models.config import DecoderConfig, check_fields
from jaxglue.models.decoder import CausalLM

FAMILIES = {"llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}
"""Family modules by Hugging Face's `model_type`."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read the decoder's shape from a parsed config.json.

    Raises:
        ValueError: the model type, rope type or activation is not supported, or a field is missing, of another type or
            out of range.
    """
    check_fields(raw)
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported: known are {', '.join(FAMILIES)}")
    return FAMILIES[model_type].config_from_hf(raw)


def build_model(config: DecoderConfig, *, dtype=jnp.bfloat16, rngs: nnx.Rngs) -> CausalLM:
    """Build a model with random weights in `dtype`; `abstract_model` has shapes only."""
    return FAMILIES[config.model_type].build(config, dtype=dtype, rngs=rngs)


def abstract_model(config: DecoderConfig, *, dtype=jnp.bfloat16) -> CausalLM:
    """Build a model with shapes and dtypes for arrays: one layer of each kind, copied for the others."""
    kinds = sorted(set(config.first_of_kind))
    model = nnx.eval_shape(lambda: build_model(config.with_layers(kinds), dtype=dtype, rngs=nnx.Rngs(0)))
    model.layers = nnx.List([nnx.clone(model.layers[kinds.index(first)]) for first in config.first_of_kind])
    model.config = config
    return model
