"""Granite 3: factors of embeddings, scores, branches and logits."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import AttentionOptions, DecoderConfig, Scales
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `GraniteForCausalLM` config.json."""
    return DecoderConfig(**decoder_fields(raw), **factors(raw), layer_windows=(None,) * raw["num_hidden_layers"])


def factors(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the factors, of which absent ones are 1, the scores' too."""

    def factor(name: str) -> float:
        return float(1 if (value := raw.get(name)) is None else value)

    return {
        "attention": AttentionOptions(scale=factor("attention_multiplier")),
        "scales": Scales(
            embedding=factor("embedding_multiplier"),
            residual=factor("residual_multiplier"),
            logit_divisor=factor("logits_scaling"),
        ),
    }


register(Family(model_type="granite", config_from_hf=config_from_hf))
