"""LFM3: LFM2's convolutions of seven tokens, norms of outputs too, and attention with a gate for each head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.models.config import ATTENTION, DecoderConfig
from jaxglue.models.family import Family, ModuleNames, NormNames, Parts, register
from jaxglue.models.hf_fields import check_fields, decoder_fields, ropes_by_type
from jaxglue.models.lfm2 import LfmFields
from jaxglue.models.short_conv import ShortConvConfig
from jaxglue.models.wrapper import Spelling, Wrapper, spell, wrap

_CONV, _FULL, _SLIDING = "conv", "full_attention", "sliding_attention"
_THETAS = {_FULL: 1_000_000.0, _SLIDING: 10_000.0}
_ROPES = {_FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5}, _SLIDING: {}}
"""Rotary embeddings where config.json has none."""
_POSITIONS = 128_000


@dataclass(frozen=True, kw_only=True)
class _Fields(LfmFields):
    use_sandwich_norm: bool
    use_attention_gate: bool


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Lfm3ForCausalLM` config.json.

    Raises:
        ValueError: a missing field, or a value that is not supported, such as a part of heads that turns by a rotation
            of the default type, which readers of config.json take for different things.
    """
    check_fields(raw, _Fields)
    for name in ("use_sandwich_norm", "use_attention_gate"):
        if raw.get(name) is False:
            raise ValueError(f"{name}=false in config.json is not supported for lfm3")
    parameters = raw.get("rope_parameters") or _ROPES
    for kind, rope in parameters.items():
        turning = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        if turning not in (None, 1.0) and rope.get("rope_type", "default") == "default":
            raise ValueError(
                f"rope_parameters in config.json: partial_rotary_factor={turning} of {kind} is unread by transformers "
                "5.24 in a rotation of type default; name the type proportional, or take the factor out"
            )
    ropes = ropes_by_type({**raw, "rope_parameters": parameters}, _THETAS, max_position_embeddings=_POSITIONS)
    given = {"head_dim": 128, "num_key_value_heads": 4, "tie_word_embeddings": True, **raw, "mlp_bias": False}
    given["rms_norm_eps"] = raw.get("norm_eps") or raw.get("rms_norm_eps")
    fields = decoder_fields(given, max_position_embeddings=_POSITIONS, eps=1e-5, rope=ropes[_FULL])
    types, window = _types(raw, fields["num_hidden_layers"]), raw.get("sliding_window", 256)
    conv = ShortConvConfig(
        channels=fields["hidden_size"], width=raw.get("conv_L_cache") or 7, bias=bool(raw.get("conv_bias"))
    )
    return DecoderConfig(
        **fields,
        layer_windows=tuple(window if kind == _SLIDING else None for kind in types),
        layer_ropes=tuple(None if kind == _CONV else ropes[kind] for kind in types),
        mixers=tuple(conv if kind == _CONV else ATTENTION for kind in types),
    )


def _types(raw: Mapping[str, Any], layers: int) -> list[str]:
    """Return each layer's type; by default of four the third attends to all, and the first, but for 0, slides."""
    pattern = (_SLIDING, _CONV, _FULL, _CONV)
    types = raw.get("layer_types") or [_CONV, *(pattern[layer % 4] for layer in range(1, layers))]
    if len(types) != layers or set(types) - set(pattern):
        raise ValueError(
            f"layer_types in config.json: expected {', '.join(sorted(set(pattern)))} for each of {layers} layers, got "
            f"{types!r:.100}"
        )
    return list(types)


register(
    Family(
        model_type="lfm3",
        config_from_hf=config_from_hf,
        parts=Parts(
            norms=NormNames(
                before_attention="operator_norm",
                after_attention="post_operator_norm",
                before_mlp="ffn_norm",
                after_mlp="post_ffn_norm",
            ),
            names=ModuleNames(mlp="feed_forward", gate="w1", up="w3", down="w2"),
            head_norms="heads",
            gate="g_proj",
            gate_per_head=True,
        ),
        linears=("self_attn.g_proj",),
    )
)
spell(Spelling(model_type="lfm3", parts=(("model.norm.", "model.embedding_norm."),)))
for _around, _text in (("lfm2_vl", "lfm2"), ("lfm3_vl", "lfm3")):
    wrap(
        Wrapper(model_type=_around, text_types=(_text,), others=("vision_tower.", "multi_modal_projector."), tied=True)
    )
