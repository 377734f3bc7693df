"""Qwen3-MoE: Qwen3's attention, with experts as the feed-forward of most layers."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields, expert_format, require_fields, sparse_layers


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3MoeForCausalLM` config.json; transformers 5 writes `num_local_experts` for `num_experts`.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    raw = {"num_experts": raw.get("num_local_experts"), "num_key_value_heads": 4, "sliding_window": 4096, **raw}
    fields = decoder_fields({**raw, "mlp_bias": False}, max_position_embeddings=32768)
    require_fields(raw, ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
    layers, window = raw["num_hidden_layers"], raw["sliding_window"] if raw.get("use_sliding_window") else None
    moe = MoeConfig(
        num_experts=raw["num_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        sparse_layers=sparse_layers(raw),
        norm_topk_prob=raw.get("norm_topk_prob", False),
        quantize=expert_format(raw),
    )
    return DecoderConfig(**fields, layer_windows=(window,) * layers, moe=moe)


register(
    Family(
        model_type="qwen3_moe",
        config_from_hf=config_from_hf,
        parts=Parts(head_norms="heads", experts=ExpertParts(stored="apart")),
    )
)
