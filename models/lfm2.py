"""LFM2: gated short convolutions in most layers, attention with norms of heads in the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.models.config import ATTENTION, DecoderConfig
from jaxglue.models.family import Family, ModuleNames, NormNames, Parts, register
from jaxglue.models.hf_fields import check_fields, decoder_fields
from jaxglue.models.short_conv import ShortConvConfig
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.settings.config import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class LfmFields:
    """Types of the fields that LFM models alone have."""

    norm_eps: PositiveFloat
    conv_bias: bool
    conv_L_cache: PositiveInt  # noqa: N815
    tie_embedding: bool
    full_attn_idxs: tuple[NonNegativeInt, ...]
    block_ff_dim: PositiveInt
    block_multiple_of: PositiveInt
    block_ffn_dim_multiplier: PositiveFloat
    block_auto_adjust_ff_dim: bool


_CONV, _FULL = "conv", "full_attention"


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Lfm2ForCausalLM` config.json, whose `block_auto_adjust_ff_dim` takes two thirds of the size it says.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    fields = lfm_fields(raw)
    return DecoderConfig(**fields | {"intermediate_size": _feed_forward_size(raw, fields["intermediate_size"])})


def lfm_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that dense and sparse models share, and each layer's part."""
    check_fields(raw, LfmFields)
    given = {"num_key_value_heads": 8, "tie_word_embeddings": True, "rms_norm_eps": raw.get("norm_eps"), **raw}
    for name, other in (("tie_word_embeddings", "tie_embedding"), ("intermediate_size", "block_ff_dim")):
        given[name] = given.get(name) if raw.get(other) is None else raw[other]
    unbiased = {"attention_bias": False, "mlp_bias": False}
    fields = decoder_fields(given | unbiased, theta=1_000_000.0, max_position_embeddings=128_000, eps=1e-5)
    types = _types(raw, fields["num_hidden_layers"])
    conv = ShortConvConfig(
        channels=fields["hidden_size"], width=raw.get("conv_L_cache") or 3, bias=bool(raw.get("conv_bias"))
    )
    return fields | {
        "layer_windows": (None,) * len(types),
        "mixers": tuple(conv if kind == _CONV else ATTENTION for kind in types),
    }


def _types(raw: Mapping[str, Any], layers: int) -> list[str]:
    attending = range(layers) if raw.get("full_attn_idxs") is None else raw["full_attn_idxs"]
    types = raw.get("layer_types") or [_FULL if layer in attending else _CONV for layer in range(layers)]
    if len(types) != layers or set(types) - {_CONV, _FULL}:
        raise ValueError(
            f"layer_types in config.json: expected {_CONV} or {_FULL} for each of {layers} layers, got {types!r:.100}"
        )
    return list(types)


def _feed_forward_size(raw: Mapping[str, Any], size: int) -> int:
    """Return the width of a feed-forward's tensors."""
    if raw.get("block_auto_adjust_ff_dim") is False:
        return size
    size = int(2 * size / 3)
    if (factor := raw.get("block_ffn_dim_multiplier", 1.0)) is None:
        return size
    multiple = raw.get("block_multiple_of") or 256
    return -(-int(factor * size) // multiple) * multiple


NORMS = NormNames(before_attention="operator_norm", before_mlp="ffn_norm")
NAMES = ModuleNames(output="out_proj", mlp="feed_forward", gate="w1", up="w3", down="w2")
LINEARS = (
    *("conv.in_proj", "conv.out_proj", "self_attn.out_proj"),
    *(f"feed_forward.{name}" for name in ("w1", "w3", "w2")),
)
SPELLED = ((".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm."), ("model.norm.", "model.embedding_norm."))
"""Parts of names here, and the files'."""
register(
    Family(
        model_type="lfm2",
        config_from_hf=config_from_hf,
        parts=Parts(norms=NORMS, names=NAMES, head_norms="heads"),
        linears=LINEARS,
    )
)
spell(Spelling(model_type="lfm2", parts=SPELLED))
