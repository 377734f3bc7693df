"""Qwen2-MoE (Qwen1.5-MoE-A2.7B): Qwen2's attention, and experts beside a gated one that all tokens share."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import AttentionOptions, DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields, expert_format, layer_windows, require_fields, sparse_layers


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen2MoeForCausalLM` config.json; transformers 5 writes `num_local_experts` for `num_experts`.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    raw = {"num_experts": raw.get("num_local_experts"), "num_key_value_heads": 16, **raw}
    fields = decoder_fields(raw, max_position_embeddings=32768)
    needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    require_fields(raw, needed)
    bias = True if raw.get("qkv_bias") is None else raw["qkv_bias"]
    fields |= {"attention_bias": bias, "attention": AttentionOptions(output_bias=False), "mlp_bias": False}
    moe = MoeConfig(
        num_experts=raw["num_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        sparse_layers=sparse_layers(raw),
        norm_topk_prob=raw.get("norm_topk_prob") or False,
        quantize=expert_format(raw),
        shared_size=raw["shared_expert_intermediate_size"],
    )
    return DecoderConfig(**fields, layer_windows=_windows(raw), moe=moe)


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the layers' windows: with `use_sliding_window`, those of even layers below `max_window_layers`."""
    layers, first = raw["num_hidden_layers"], raw.get("max_window_layers")
    if not raw.get("use_sliding_window"):
        return (None,) * layers
    last = 28 if first is None else first
    types = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(layers)]
    return layer_windows(raw, types, raw.get("sliding_window", 4096))


_EXPERTS = ExpertParts(shared_gate=True, stored="apart")
register(Family(model_type="qwen2_moe", config_from_hf=config_from_hf, parts=Parts(experts=_EXPERTS)))
