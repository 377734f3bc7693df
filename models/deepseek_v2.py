"""DeepSeek-V2 and V2-Lite: latent attention, and experts by a softmax, of some groups alone in the larger model."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.glm4_moe import routed_experts
from jaxglue.models.latent import latent_fields

_DEFAULTS = {"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
_GROUPED = "group_limited_greedy"


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `DeepseekV2ForCausalLM` config.json, whose weights are never normalized.

    Raises:
        ValueError: a missing field, or values that are not supported or contradict each other.
    """
    nulls = {"q_lora_rank": raw.get("q_lora_rank", 1536)}  # null: queries are projected at once
    raw = {**_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}, **nulls}
    if (method := raw["topk_method"]) not in ("greedy", _GROUPED):
        raise ValueError(f"topk_method {method!r} in config.json is not supported: greedy and {_GROUPED} are")
    if method == _GROUPED and not ("n_group" in raw and "topk_group" in raw):
        raise ValueError(f"topk_method {_GROUPED} in config.json needs n_group and topk_group")
    groups = {} if method == _GROUPED else {"n_group": 1, "topk_group": 1}
    moe = routed_experts({"n_group": 1, "topk_group": 1, **raw, **groups, "norm_topk_prob": False})
    fields = latent_fields({**raw, "rope_interleave": True}, max_position_embeddings=2048)
    return DecoderConfig(**fields, moe=moe)


_EXPERTS = ExpertParts(float32_router=True, stored="apart", shared="shared_experts")
register(Family(model_type="deepseek_v2", config_from_hf=config_from_hf, parts=Parts(experts=_EXPERTS)))
