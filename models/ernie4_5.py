"""ERNIE 4.5 (dense): heads turn in neighboring pairs, and one switch gives all linear layers biases."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Ernie4_5ForCausalLM` config.json."""
    fields = ernie_fields({"head_dim": 128, "num_key_value_heads": 2, **raw})
    return DecoderConfig(**fields, layer_windows=(None,) * raw["num_hidden_layers"])


def ernie_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that dense and sparse models share."""
    bias = bool(raw.get("use_bias"))
    given = {"tie_word_embeddings": True, **raw, "attention_bias": bias, "mlp_bias": bias}
    return decoder_fields(given, theta=500_000.0, max_position_embeddings=131_072, eps=1e-5, interleaved=True)


register(Family(model_type="ernie4_5", config_from_hf=config_from_hf))
