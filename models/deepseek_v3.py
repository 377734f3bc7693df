"""DeepSeek-V3 and R1, Kimi-K2's and Moonlight's kind: latent attention, and a router of sigmoids with stored biases."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.glm4_moe import SIGMOID_EXPERTS, routed_experts
from jaxglue.models.latent import check_rotated_size, latent_fields
from jaxglue.models.wrapper import Spelling, spell

_DEFAULTS = {
    **{"first_k_dense_replace": 3, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"n_group": 8, "topk_group": 4},
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `DeepseekV3ForCausalLM` config.json.

    Raises:
        ValueError: a missing field, or values that are not supported or contradict each other.
    """
    nulls = {  # that are no absent values, as in transformers
        "norm_topk_prob": bool(raw.get("norm_topk_prob", True)),
        "q_lora_rank": raw.get("q_lora_rank", 1536),
    }
    raw = {**_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}, **nulls}
    check_rotated_size(raw)
    fields = latent_fields(raw, max_position_embeddings=4096) | {"mlp_bias": False}
    return DecoderConfig(**fields, moe=routed_experts(raw))


register(
    Family(
        model_type="deepseek_v3",
        config_from_hf=config_from_hf,
        parts=Parts(experts=SIGMOID_EXPERTS),
    )
)
spell(Spelling(model_type="deepseek_v3", layers=0))
