"""Kimi Linear (48B-A3B): Kimi Delta Attention in three layers of four, latent attention without positions between."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.glm4_moe import SIGMOID_EXPERTS, routed_experts
from jaxglue.models.hf_fields import check_fields, require_fields
from jaxglue.models.kda import LINEARS, KDAConfig
from jaxglue.models.latent import latent_fields
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.settings.config import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class _Fields:
    linear_head_dim: PositiveInt
    linear_num_heads: PositiveInt
    model_max_length: PositiveInt
    moe_renormalize: bool
    num_expert_group: PositiveInt
    num_experts_per_token: PositiveInt
    num_shared_experts: PositiveInt
    moe_router_activation_func: str
    moe_layer_freq: PositiveInt
    mla_use_nope: bool
    use_grouped_topk: bool


@dataclass(frozen=True, kw_only=True)
class _LinearFields:
    head_dim: PositiveInt
    num_heads: PositiveInt
    short_conv_kernel_size: PositiveInt
    kda_layers: tuple[NonNegativeInt, ...]
    full_attn_layers: tuple[NonNegativeInt, ...]


_DEFAULTS: dict[str, Any] = {
    **{"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1},
    **{"moe_renormalize": True, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 1024, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
}
NAMES = {
    **{"num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts"},
    **{"n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize", "num_local_experts": "num_experts"},
    **{"n_routed_experts": "num_experts", "max_position_embeddings": "model_max_length"},
}
"""transformers' names of fields, and the files'."""
_ONLY = {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True}
_LINEAR, _FULL = "linear_attention", "full_attention"


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `KimiLinearForCausalLM` config.json, as published or as transformers writes it.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {**_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
    for name, only in _ONLY.items():
        if given.get(name, only) != only:
            raise ValueError(f"{name} {given[name]!r:.100} is not supported for kimi_linear: only {only!r} is")
    require_fields(given, ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    linear = given.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ValueError(f"linear_attn_config in config.json: expected an object, got {linear!r:.100}")
    check_fields(linear, _LinearFields)
    for ours, theirs in NAMES.items():
        given[ours] = raw.get(ours) if raw.get(ours) is not None else given.get(theirs)
    types = layer_types(given, linear)
    kda = KDAConfig(
        num_heads=linear.get("num_heads", given["linear_num_heads"]),
        head_dim=linear.get("head_dim", given["linear_head_dim"]),
        conv_width=linear.get("short_conv_kernel_size", given["linear_conv_kernel_dim"]),
    )
    latent = {**given, "q_lora_rank": raw.get("q_lora_rank"), "rope_parameters": None, "rope_scaling": None}
    fields = latent_fields(latent, max_position_embeddings=1_048_576, eps=1e-5) | {"mlp_bias": False}
    full = fields["mixers"][0]
    fields |= {"mixers": tuple(full if kind == _FULL else kda for kind in types)}
    return DecoderConfig(
        **fields, layer_ropes=(None,) * len(types), moe=with_types(routed_experts(given), raw.get("mlp_layer_types"))
    )


def layer_types(given: Mapping[str, Any], linear: Mapping[str, Any]) -> list[str]:
    """Return each layer's part, from numbers of layers that begin at 1, from `layer_types`, or every fifth full."""
    layers = given["num_hidden_layers"]
    types = given.get("layer_types")
    if types is None and {"kda_layers", "full_attn_layers"} <= linear.keys():
        numbered = dict.fromkeys(linear["kda_layers"], _LINEAR) | dict.fromkeys(linear["full_attn_layers"], _FULL)
        types = [numbered.get(number) for number in range(1, layers + 1)]
    types = types or [_FULL if i and i % 4 == 0 else _LINEAR for i in range(layers)]
    if len(types) != layers or not {_LINEAR, _FULL} >= set(types):
        raise ValueError(
            f"layer_types in config.json: expected {_LINEAR} or {_FULL} for each of {layers} layers, or the numbers of "
            f"all in kda_layers and full_attn_layers of linear_attn_config, got {types!r:.100}"
        )
    return list(types)


def with_types(moe: Any, types: Any) -> Any:
    """Return the experts in the layers that `mlp_layer_types` of a config.json calls sparse, where it has any."""
    if types is None:
        return moe
    if len(types) != len(moe.sparse_layers) or not {"dense", "sparse"} >= set(types):
        raise ValueError(
            f"mlp_layer_types in config.json: expected dense or sparse for each of {len(moe.sparse_layers)} layers, "
            f"got {types!r:.100}"
        )
    return replace(moe, sparse_layers=tuple(kind == "sparse" for kind in types))


_GATE = ".self_attn.forget_gate."
SPELLED = tuple(
    (_GATE + name, f".self_attn.{name}") for name in ("f_a_proj.", "f_b_proj.", "f_proj.", "dt_bias", "A_log")
)
"""Parts of the names of decays, and the files'."""
_EXPERTS = tuple((f".mlp.{name}.", f".block_sparse_moe.{name}.") for name in ("gate", "experts", "shared_experts"))
_EXPERT = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
register(
    Family(
        model_type="kimi_linear",
        config_from_hf=config_from_hf,
        parts=Parts(experts=replace(SIGMOID_EXPERTS, stored="by_number")),
        linears=LINEARS,
    )
)
spell(Spelling(model_type="kimi_linear", parts=(*SPELLED, *_EXPERTS), experts=_EXPERT))
