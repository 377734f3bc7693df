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
    """Build a model with random weights in `dtype`; under `nnx.eval_shape`, shapes only."""
    return FAMILIES[config.model_type].build(config, dtype=dtype, rngs=rngs)
