"""Llama 3.x: grouped-query attention, llama3 rope scaling, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `LlamaForCausalLM` config.json."""
    return DecoderConfig(**decoder_fields(raw), layer_windows=(None,) * raw["num_hidden_layers"])


register(Family(model_type="llama", config_from_hf=config_from_hf))
