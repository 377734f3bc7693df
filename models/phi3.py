"""Phi-3, Phi-4: one projection for queries, keys and values, and one for gate and up."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Phi3ForCausalLM` config.json.

    Raises:
        ValueError: a field missing or not supported, such as rope types other than the default and longrope.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "su", "yarn", "longrope"):
        raise ValueError(f"rope type {kind!r} is not supported for phi3: only 'default' and 'longrope' are")
    if kind != "default":  # names of longrope, here
        scaling = {**scaling, "rope_type": "longrope"}
    original = raw.get("original_max_position_embeddings") or 4096
    given = {**raw, "rope_scaling": scaling, "original_max_position_embeddings": original}
    fields = decoder_fields(given, max_position_embeddings=4096, eps=1e-5, partial=1.0)
    fields |= {"attention_bias": False, "mlp_bias": False}
    return DecoderConfig(**fields, layer_windows=(raw.get("sliding_window"),) * raw["num_hidden_layers"])


register(Family(model_type="phi3", config_from_hf=config_from_hf, parts=Parts(fused_qkv=True, fused_gate_up=True)))
