"""Qwen3.5 with experts (35B-A3B; text): in every layer, and beside them a gated one that all tokens share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxglue.models import qwen3_5
from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, register
from jaxglue.models.hf_fields import expert_format, require_fields
from jaxglue.models.wrapper import Spelling, spell, wrap


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3_5MoeForCausalLM` config.json; transformers 5 may write `num_local_experts` for `num_experts`.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    raw = {"num_experts": raw.get("num_local_experts"), "num_key_value_heads": 2, **raw}
    needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    require_fields(raw, ("num_hidden_layers", *needed))
    moe = MoeConfig(
        num_experts=raw["num_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        sparse_layers=(True,) * raw["num_hidden_layers"],
        quantize=expert_format(raw),
        shared_size=raw["shared_expert_intermediate_size"],
    )
    dense = {**raw, "intermediate_size": raw["moe_intermediate_size"]}  # of which there is none
    return replace(qwen3_5.config_from_hf(dense), moe=moe)


register(
    Family(
        model_type="qwen3_5_moe_text",
        config_from_hf=config_from_hf,
        parts=replace(qwen3_5.PARTS, experts=ExpertParts(shared_gate=True)),
    )
)
wrap(replace(qwen3_5.WRAPPER, model_type="qwen3_5_moe", text_types=("qwen3_5_moe_text",)))
spell(Spelling(model_type="qwen3_5_moe_text", others=("mtp.",)))
