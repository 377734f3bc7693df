"""Qwen3 (dense): norms on queries and keys, optional sliding windows."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields, later_windows


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3ForCausalLM` config.json."""
    return DecoderConfig(
        **decoder_fields(
            {"head_dim": 128, "num_key_value_heads": 32, **raw, "mlp_bias": False}, max_position_embeddings=32768
        ),
        layer_windows=later_windows(raw),
    )


register(Family(model_type="qwen3", config_from_hf=config_from_hf, parts=Parts(head_norms="heads")))
