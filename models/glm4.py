"""GLM-4: four norms, half of each head turns in neighboring pairs, and one projection for gate and up."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import AttentionOptions, DecoderConfig
from jaxglue.models.family import Family, NormNames, Parts, register
from jaxglue.models.hf_fields import decoder_fields

_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Glm4ForCausalLM` config.json; `attention_bias` is of queries, keys and values."""
    fields = decoder_fields(
        {**_DEFAULTS, **raw}, max_position_embeddings=131_072, eps=1.5625e-7, partial=0.5, interleaved=True
    )
    fields |= {"attention": AttentionOptions(output_bias=False), "mlp_bias": False}
    return DecoderConfig(**fields, layer_windows=(None,) * raw["num_hidden_layers"])


_NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
register(Family(model_type="glm4", config_from_hf=config_from_hf, parts=Parts(norms=_NORMS, fused_gate_up=True)))
