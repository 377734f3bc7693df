"""Mistral: a sliding window in all layers, or in none."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig, decoder_fields
from jaxglue.models.family import Family, register


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `MistralForCausalLM` config.json, where an absent window is 4096 and a null one none."""
    fields = decoder_fields({"num_key_value_heads": 8, **raw}, max_position_embeddings=131_072)
    fields |= {"attention_bias": False, "mlp_bias": False}
    return DecoderConfig(**fields, layer_windows=(raw.get("sliding_window", 4096),) * raw["num_hidden_layers"])


register(Family(model_type="mistral", config_from_hf=config_from_hf))
