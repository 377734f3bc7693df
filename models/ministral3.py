"""Ministral 3: YaRN, and queries that grow with their position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""transformers' where config.json has none."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Ministral3ForCausalLM` config.json.

    Raises:
        ValueError: a field missing or not supported, such as rope parameters without `llama_4_scaling_beta`.
    """
    rope: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or _ROPE
    if (original := raw.get("original_max_position_embeddings")) is not None:
        rope = {**rope, "original_max_position_embeddings": original}
    given = {"head_dim": 128, "num_key_value_heads": 8, **raw, "rope_scaling": None, "rope_parameters": rope}
    fields = decoder_fields(given, max_position_embeddings=262_144, eps=1e-5)
    beta: Any = rope.get("llama_4_scaling_beta")
    length: Any = rope.get("original_max_position_embeddings")
    if type(beta) not in (int, float) or type(length) is not int or length < 1:
        raise ValueError(
            "ministral3 needs numbers llama_4_scaling_beta and original_max_position_embeddings in config.json's "
            f"rope_parameters, got {beta!r} and {length!r}"
        )
    fields |= {"rope": replace(fields["rope"], query_scale=(float(beta), length))}
    fields |= {"attention_bias": False, "mlp_bias": False}
    return DecoderConfig(**fields, layer_windows=(raw.get("sliding_window"),) * raw["num_hidden_layers"])


register(Family(model_type="ministral3", config_from_hf=config_from_hf))
