"""ERNIE 4.5 with experts (21B-A3B): a softmax whose choice stored biases correct, and experts that all tokens share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.ernie4_5 import ernie_fields
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import check_fields, expert_format, require_fields
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.settings.config import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class _Fields:
    moe_num_experts: PositiveInt
    moe_k: PositiveInt
    moe_num_shared_experts: NonNegativeInt
    moe_layer_start_index: NonNegativeInt
    moe_layer_end_index: int
    moe_layer_interval: PositiveInt


_DEFAULTS = {
    **{"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "num_key_value_heads": 4},
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Ernie4_5_MoeForCausalLM` config.json, whose last sparse layer is the model's where it says -1.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {**_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
    require_fields(given, ("num_hidden_layers",))
    layers, end = given["num_hidden_layers"], given["moe_layer_end_index"]
    sparse = range(given["moe_layer_start_index"], (layers - 1 if end == -1 else end) + 1)
    moe = MoeConfig(
        num_experts=given["moe_num_experts"],
        num_experts_per_tok=given["moe_k"],
        intermediate_size=given["moe_intermediate_size"],
        sparse_layers=tuple(i in sparse and (i + 1) % given["moe_layer_interval"] == 0 for i in range(layers)),
        quantize=expert_format(given | {"num_experts": given["moe_num_experts"]}),
        shared_size=given["moe_intermediate_size"] * given["moe_num_shared_experts"],
    )
    return DecoderConfig(**ernie_fields(given), layer_windows=(None,) * layers, moe=moe)


_EXPERTS = ExpertParts(float32_router=True, correction=True, correction_axes=2, stored="apart", shared="shared_experts")
register(Family(model_type="ernie4_5_moe", config_from_hf=config_from_hf, parts=Parts(experts=_EXPERTS)))
_CORRECTION = ("gate.e_score_correction_bias", "moe_statics.e_score_correction_bias")
spell(Spelling(model_type="ernie4_5_moe", parts=(_CORRECTION,), others=("model.mtp",)))
