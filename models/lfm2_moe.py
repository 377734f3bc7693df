"""LFM2 with experts (8B-A1B): a router of sigmoids with stored biases behind the first, dense layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import check_fields, expert_format, require_fields
from jaxglue.models.lfm2 import LINEARS, NAMES, NORMS, SPELLED, lfm_fields
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.settings.config import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class _Fields:
    num_dense_layers: NonNegativeInt
    use_expert_bias: bool


_DEFAULTS = {
    **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2},
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Lfm2MoeForCausalLM` config.json.

    Raises:
        ValueError: a missing field, or a value that is not supported, such as a router without stored biases.
    """
    check_fields(raw, _Fields)
    given = {**_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
    require_fields(given, ("num_hidden_layers",))
    fields = lfm_fields(given)
    require_fields(given, ("layer_types",))
    if not given["use_expert_bias"]:
        raise ValueError("use_expert_bias=false in config.json is not supported for lfm2_moe")
    moe = MoeConfig(
        num_experts=given["num_experts"],
        num_experts_per_tok=given["num_experts_per_tok"],
        intermediate_size=given["moe_intermediate_size"],
        sparse_layers=tuple(i >= given["num_dense_layers"] for i in range(given["num_hidden_layers"])),
        norm_topk_prob=given["norm_topk_prob"],
        quantize=expert_format(given),
        routed_scale=given["routed_scaling_factor"],
    )
    return DecoderConfig(**fields, moe=moe)


_EXPERTS = ExpertParts(order="sigmoid_topk", correction=True, stored="by_number")
register(
    Family(
        model_type="lfm2_moe",
        config_from_hf=config_from_hf,
        parts=Parts(norms=NORMS, names=NAMES, head_norms="heads", experts=_EXPERTS),
        linears=LINEARS,
    )
)
_CORRECTION = (".feed_forward.gate.e_score_correction_bias", ".feed_forward.expert_bias")
_EXPERT = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
spell(Spelling(model_type="lfm2_moe", parts=(*SPELLED, _CORRECTION), experts=_EXPERT))
