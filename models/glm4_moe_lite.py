"""GLM-4.7-Flash: DeepSeek-V3's latent attention and router, in a model of 30B parameters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.glm4_moe import SIGMOID_EXPERTS, routed_experts
from jaxglue.models.latent import check_rotated_size, latent_fields
from jaxglue.models.wrapper import Spelling, spell

_DEFAULTS = {
    **{"n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1},
    "num_experts_per_tok": 4,
}
_KINDS = ("dense", "sparse")


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Glm4MoeLiteForCausalLM` config.json, where `mlp_layer_types` has the dense layers: else the first.

    Raises:
        ValueError: a missing field, or values that are not supported or contradict each other.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    rank = raw.get("q_lora_rank", 768)  # null: queries are projected at once
    raw = {**_DEFAULTS, **given, "first_k_dense_replace": 1, "q_lora_rank": rank}
    check_rotated_size(raw)
    fields = latent_fields(raw, max_position_embeddings=202_752, eps=1e-5) | {"mlp_bias": False}
    moe, types = routed_experts(raw), raw.get("mlp_layer_types")
    if types is not None:
        if len(types) != len(moe.sparse_layers) or set(types) - set(_KINDS):
            raise ValueError(
                f"mlp_layer_types in config.json: expected dense or sparse for each of {len(moe.sparse_layers)} "
                f"layers, got {types!r:.100}"
            )
        moe = replace(moe, sparse_layers=tuple(kind == "sparse" for kind in types))
    return DecoderConfig(**fields, moe=moe)


register(
    Family(
        model_type="glm4_moe_lite",
        config_from_hf=config_from_hf,
        parts=Parts(experts=SIGMOID_EXPERTS),
    )
)
spell(Spelling(model_type="glm4_moe_lite", layers=0))
