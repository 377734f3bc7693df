"""Mistral: a sliding window in all layers, in none, or in some (Ministral)."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields, layer_windows


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `MistralForCausalLM` config.json, where an absent window is 4096 and a null one none.

    With `layer_types`, transformers takes it for a `MinistralForCausalLM`'s.
    """
    fields = decoder_fields({"num_key_value_heads": 8, **raw}, max_position_embeddings=131_072)
    fields |= {"attention_bias": False, "mlp_bias": False}
    window, layers = raw.get("sliding_window", 4096), raw["num_hidden_layers"]
    if window is None:
        return DecoderConfig(**fields, layer_windows=(None,) * layers)
    return DecoderConfig(**fields, layer_windows=layer_windows(raw, ["sliding_attention"] * layers, window))


for _type in ("mistral", "ministral"):
    register(Family(model_type=_type, config_from_hf=config_from_hf))
