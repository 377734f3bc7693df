"""GLM-4.5 to 4.7: a router of sigmoids with stored biases, experts that all tokens share, and first dense layers."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import AttentionOptions, DecoderConfig, MoeConfig
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields, expert_format, require_fields
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.ops.moe import Groups

_DEFAULTS = {
    **{"num_key_value_heads": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False},
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Glm4MoeForCausalLM` config.json; `attention_bias` is of queries, keys and values.

    Raises:
        ValueError: a missing field, a value that is not supported, or groups that do not divide the experts.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    raw = {**_DEFAULTS, **({"n_routed_experts": given["num_local_experts"]} if "num_local_experts" in given else {})}
    raw |= given
    fields = decoder_fields(raw, max_position_embeddings=131_072, eps=1e-5, partial=0.5)
    fields |= {"attention": AttentionOptions(output_bias=False, head_norms=raw["use_qk_norm"]), "mlp_bias": False}
    layers = raw["num_hidden_layers"]
    return DecoderConfig(**fields, layer_windows=(None,) * layers, moe=routed_experts(raw))


def routed_experts(raw: Mapping[str, Any]) -> MoeConfig:
    """Read the experts of a config.json with DeepSeek's fields, all of which are there but for sizes."""
    require_fields(raw, ("num_hidden_layers", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"))
    return MoeConfig(
        num_experts=raw["n_routed_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        sparse_layers=tuple(i >= raw["first_k_dense_replace"] for i in range(raw["num_hidden_layers"])),
        norm_topk_prob=raw["norm_topk_prob"],
        quantize=expert_format(raw),
        shared_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        groups=Groups(raw["n_group"], raw["topk_group"]),
        routed_scale=raw["routed_scaling_factor"],
    )


SIGMOID_EXPERTS = ExpertParts(
    order="sigmoid_topk", float32_router=True, correction=True, stored="apart", shared="shared_experts"
)
register(
    Family(
        model_type="glm4_moe",
        config_from_hf=config_from_hf,
        parts=Parts(head_norms="heads", experts=SIGMOID_EXPERTS),
    )
)
spell(Spelling(model_type="glm4_moe", layers=0))
