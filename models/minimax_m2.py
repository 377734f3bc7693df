"""MiniMax M2: Mixtral's names, a router of sigmoids with stored biases, and norms of whole queries and keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import check_fields, decoder_fields, expert_format, require_fields
from jaxglue.models.mixtral import EXPERT_NAMES
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.settings.config import PositiveInt

_DEFAULTS = {"num_local_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 8, "head_dim": 128}


@dataclass(frozen=True, kw_only=True)
class _Fields:
    rotary_dim: PositiveInt


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `MiniMaxM2ForCausalLM` config.json, where `rotary_dim` of each head's dimensions turn.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {**_DEFAULTS, "num_local_experts": raw.get("num_experts") or _DEFAULTS["num_local_experts"]}
    given |= {name: value for name, value in raw.items() if value is not None}
    require_fields(given, ("num_hidden_layers", "intermediate_size"))
    if (turning := given.get("rotary_dim")) is not None and given.get("partial_rotary_factor") is None:
        given["partial_rotary_factor"] = turning / given["head_dim"]
    fields = decoder_fields(given, theta=5_000_000.0, max_position_embeddings=196_608, partial=1.0)
    layers = given["num_hidden_layers"]
    moe = MoeConfig(
        num_experts=given["num_local_experts"],
        num_experts_per_tok=given["num_experts_per_tok"],
        intermediate_size=given["intermediate_size"],
        sparse_layers=(True,) * layers,
        quantize=expert_format(given),
    )
    return DecoderConfig(
        **fields | {"attention_bias": False, "mlp_bias": False}, layer_windows=(None,) * layers, moe=moe
    )


_EXPERTS = ExpertParts(order="sigmoid_topk", correction=True, stored="by_number")
register(
    Family(model_type="minimax_m2", config_from_hf=config_from_hf, parts=Parts(head_norms="full", experts=_EXPERTS))
)
_CORRECTION = (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias")
spell(Spelling(model_type="minimax_m2", parts=(*EXPERT_NAMES, _CORRECTION)))
