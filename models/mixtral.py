"""Mixtral: Mistral's attention, with experts as the feed-forward of all layers."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields, expert_format, require_fields
from jaxglue.models.wrapper import Spelling, spell

_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `MixtralForCausalLM` config.json, where an absent window is none; `intermediate_size` is an expert's.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    fields = decoder_fields(
        {"num_key_value_heads": 8, **raw}, theta=1_000_000.0, max_position_embeddings=131_072, eps=1e-5
    )
    fields |= {"attention_bias": False, "mlp_bias": False}
    own = {"num_local_experts": raw.get("num_experts"), **{k: v for k, v in raw.items() if v is not None}}
    own = {**_DEFAULTS, **{name: value for name, value in own.items() if value is not None}}
    require_fields(own, _DEFAULTS)
    layers = raw["num_hidden_layers"]
    moe = MoeConfig(
        num_experts=own["num_local_experts"],
        num_experts_per_tok=own["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
        sparse_layers=(True,) * layers,
        quantize=expert_format(raw),
    )
    return DecoderConfig(**fields, layer_windows=(raw.get("sliding_window"),) * layers, moe=moe)


_PARTS = Parts(experts=ExpertParts(stored="by_number"))
register(Family(model_type="mixtral", config_from_hf=config_from_hf, parts=_PARTS))
_EXPERT = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
EXPERT_NAMES = ((".mlp.", ".block_sparse_moe."), *((f".{ours}.", f".{theirs}.") for ours, theirs in _EXPERT))
"""Parts of the names of experts, and the files'."""
spell(Spelling(model_type="mixtral", parts=EXPERT_NAMES))
