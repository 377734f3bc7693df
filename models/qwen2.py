"""Qwen2, Qwen2.5: biases of queries, keys and values, optional sliding windows."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import AttentionOptions, DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields, later_windows


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen2ForCausalLM` config.json."""
    fields = decoder_fields({"num_key_value_heads": 32, **raw}, max_position_embeddings=32768)
    fields |= {"attention_bias": True, "attention": AttentionOptions(output_bias=False)}  # not in config.json
    fields |= {"mlp_bias": False}
    return DecoderConfig(**fields, layer_windows=later_windows(raw))


register(Family(model_type="qwen2", config_from_hf=config_from_hf))
