"""GPT-OSS: attention with sinks in alternating windows, YaRN, biases everywhere, clamped SwiGLU experts."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields, expert_format, layer_windows, require_fields
from jaxglue.ops.choices import Storage
from jaxglue.ops.moe import GPT_OSS_LIMIT

_DEFAULTS = {"attention_bias": True, "rms_norm_eps": 1e-5}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' where config.json has none."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `GptOssForCausalLM` config.json; its `quantization_config` may declare MXFP4 experts.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    given = {name: value for name, value in raw.items() if value is not None or name not in _DEFAULTS}
    raw = {**_DEFAULTS, "head_dim": 64, "num_key_value_heads": 8, "num_local_experts": raw.get("num_experts"), **given}
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw["rope_parameters"] = _ROPE
    fields = decoder_fields(raw, theta=150_000.0, max_position_embeddings=131_072)
    require_fields(raw, ("num_local_experts", "num_experts_per_tok"))
    layers = raw["num_hidden_layers"]
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if (limit := raw.get("swiglu_limit", GPT_OSS_LIMIT)) != GPT_OSS_LIMIT:
        raise ValueError(f"swiglu_limit={limit} in config.json is not supported: only {GPT_OSS_LIMIT} is")
    moe = MoeConfig(
        num_experts=raw["num_local_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
        sparse_layers=(True,) * layers,
        quantize=_experts_format(raw),
    )
    return DecoderConfig(**fields, layer_windows=layer_windows(raw, types, raw.get("sliding_window", 128)), moe=moe)


def _experts_format(raw: Mapping[str, Any]) -> Storage:
    how, config = expert_format(raw), raw.get("quantization_config")
    if how == "none" and config:
        method = config.get("quant_method")
        raise ValueError(f"quant_method {method!r} in config.json's quantization_config is not supported: 'mxfp4' is")
    return how


_EXPERTS = ExpertParts(router="router", order="topk_softmax", activation="gpt_oss", transposed=False, bias=True)
register(Family(model_type="gpt_oss", config_from_hf=config_from_hf, parts=Parts(sinks=True, experts=_EXPERTS)))
