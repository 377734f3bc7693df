"""Granite 3: factors of embeddings, scores, branches and logits."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields

_FACTORS = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logit_divisor",
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `GraniteForCausalLM` config.json, where absent factors are 1, the scores' too."""
    factors: dict[str, Any] = {
        ours: float(1 if (value := raw.get(name)) is None else value) for name, ours in _FACTORS.items()
    }
    return DecoderConfig(**decoder_fields(raw), **factors, layer_windows=(None,) * raw["num_hidden_layers"])


register(Family(model_type="granite", config_from_hf=config_from_hf))
