"""Seed-OSS: biases of queries, keys and values, and none of attention's output."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import AttentionOptions, DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `SeedOssForCausalLM` config.json; `attention_bias` is of queries, keys and values."""
    output_bias = bool(raw.get("attention_out_bias"))
    given = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, **raw}
    return DecoderConfig(
        **decoder_fields(given, max_position_embeddings=524_288),
        layer_windows=(None,) * raw["num_hidden_layers"],
        attention=AttentionOptions(output_bias=output_bias),
    )


register(Family(model_type="seed_oss", config_from_hf=config_from_hf))
