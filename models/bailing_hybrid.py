"""Ling 3: Kimi Delta Attention with bounded decays in five layers of six, gated latent attention between."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.glm4_moe import SIGMOID_EXPERTS, routed_experts
from jaxglue.models.hf_fields import check_fields, require_fields
from jaxglue.models.kda import LINEARS, KDAConfig
from jaxglue.models.kimi_linear import NAMES, SPELLED, with_types
from jaxglue.models.latent import latent_fields
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.settings.config import PositiveInt


@dataclass(frozen=True, kw_only=True)
class _Fields:
    linear_head_dim: PositiveInt
    linear_num_heads: PositiveInt
    layer_group_size: PositiveInt
    short_conv_kernel_size: PositiveInt
    model_max_length: PositiveInt
    moe_renormalize: bool
    num_expert_group: PositiveInt
    num_experts_per_token: PositiveInt
    num_shared_experts: PositiveInt
    kda_safe_gate: bool
    kda_lower_bound: float


_DEFAULTS: dict[str, Any] = {
    **{"num_experts": 512, "num_experts_per_token": 8, "num_shared_experts": 1, "num_expert_group": 8, "topk_group": 4},
    **{"moe_renormalize": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "head_dim": 128},
    **{"moe_intermediate_size": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6},
    **{"kda_safe_gate": True, "kda_lower_bound": -5.0},
}
_LINEAR, _FULL = "linear_attention", "full_attention"


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `BailingHybridForCausalLM` config.json, as published or as transformers writes it.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {**_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
    require_fields(given, ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    for ours, theirs in NAMES.items():
        given[ours] = raw.get(ours) if raw.get(ours) is not None else given.get(theirs)
    layers, every = given["num_hidden_layers"], given["layer_group_size"]
    types = given.get("layer_types") or [_LINEAR if (i + 1) % every else _FULL for i in range(layers)]
    if len(types) != layers or not {_LINEAR, _FULL} >= set(types):
        raise ValueError(
            f"layer_types in config.json: expected {_LINEAR} or {_FULL} for each of {layers} layers, got {types!r:.100}"
        )
    if given["kda_lower_bound"] >= 0:
        raise ValueError(f"kda_lower_bound in config.json: expected a number below 0, got {given['kda_lower_bound']}")
    kda = KDAConfig(
        num_heads=given.get("linear_num_heads", given["num_attention_heads"]),
        head_dim=given.get("linear_head_dim", given["head_dim"]),
        conv_width=given.get("linear_conv_kernel_dim", given["short_conv_kernel_size"]),
        least=given["kda_lower_bound"] if given["kda_safe_gate"] else None,
        low_rank=False,
    )
    latent = {**given, "q_lora_rank": raw.get("q_lora_rank")}
    fields = latent_fields(latent, theta=6_000_000.0, max_position_embeddings=262_144) | {"mlp_bias": False}
    full = fields["mixers"][0]
    fields |= {"mixers": tuple(full if kind == _FULL else kda for kind in types)}
    return DecoderConfig(**fields, moe=with_types(routed_experts(given), raw.get("mlp_layer_types")))


_PARTS = (
    *((".self_attn.", ".attention."), (".self_attn.o_proj.", ".self_attn.dense.")),
    *(("model.embed_tokens.", "model.word_embeddings."),),
    (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
)
register(
    Family(
        model_type="bailing_hybrid",
        config_from_hf=config_from_hf,
        parts=Parts(experts=SIGMOID_EXPERTS, gate="g_proj", gate_per_head=True),
        linears=LINEARS,
    )
)
spell(Spelling(model_type="bailing_hybrid", parts=(*_PARTS, *SPELLED), layers=0))
