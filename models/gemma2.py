"""Gemma 2: four norms, GeGLU, capped scores and logits, windows in every other layer."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import AttentionOptions, DecoderConfig, Scales
from jaxglue.models.family import Family, NormNames, Parts, register
from jaxglue.models.hf_fields import decoder_fields, layer_windows
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.ops.rope import RopeConfig

NORMS: dict[str, Any] = {
    "norms": NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    "norm": NormStyle(offset=1.0, rounds_first=False),
}
"""Parts of all Gemmas."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Gemma2ForCausalLM` config.json."""
    fields = gemma_fields(
        raw,
        max_position_embeddings=8192,
        softcap=raw.get("attn_logit_softcapping", 50.0),
        logit_softcap=raw.get("final_logit_softcapping", 30.0),
    )
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(raw["num_hidden_layers"])]
    return DecoderConfig(
        **fields,
        layer_windows=layer_windows(raw, types, raw.get("sliding_window", 4096)),
    )


def gemma_fields(
    raw: Mapping[str, Any],
    *,
    max_position_embeddings: int,
    rope: RopeConfig | None = None,
    softcap: float | None = None,
    logit_softcap: float | None = None,
) -> dict[str, Any]:
    """Read the fields that Gemmas share; caps are of scores and of logits.

    Raises:
        ValueError: a field missing or not supported, such as attention to later tokens.
    """
    if raw.get("use_bidirectional_attention"):
        raise ValueError(f"use_bidirectional_attention in config.json is not supported for {raw['model_type']}")
    given = {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, **raw}
    given["hidden_act"] = raw.get("hidden_activation") or "gelu_pytorch_tanh"  # their own `hidden_act` is unread
    fields = decoder_fields(
        given, max_position_embeddings=max_position_embeddings, activations=("gelu_pytorch_tanh",), rope=rope
    )
    scale = (256 if (width := raw.get("query_pre_attn_scalar")) is None else width) ** -0.5
    return {
        **fields,
        "mlp_bias": False,
        "attention": AttentionOptions(scale=scale, softcap=softcap),
        "scales": Scales(embedding=raw["hidden_size"] ** 0.5, logit_softcap=logit_softcap),
    }


register(Family(model_type="gemma2", config_from_hf=config_from_hf, parts=Parts(**NORMS)))
