"""Qwen3.5 (dense, text): three layers of linear attention for each layer of gated attention."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import ATTENTION, DecoderConfig
from jaxglue.models.delta_net import DeltaConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields, layer_windows, require_fields
from jaxglue.models.qwen_vision import with_tower
from jaxglue.models.wrapper import TEXT_PATH, Spelling, Wrapper, spell, wrap
from jaxglue.ops.norm_rope import NormStyle

_SIZES = {
    "num_key_heads": ("linear_num_key_heads", 16),
    "num_value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "conv_width": ("linear_conv_kernel_dim", 4),
}
"""Fields of config.json and their defaults, by those of `DeltaConfig`."""
_LINEAR, _FULL = "linear_attention", "full_attention"


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3_5ForCausalLM` config.json; raise ValueError for other types of layers."""
    require_fields(raw, ("num_hidden_layers",))
    types = _layer_types(raw)
    if unknown := sorted(set(types) - {_LINEAR, _FULL}):
        raise ValueError(f"layer_types {', '.join(unknown)} are not supported: only {_LINEAR}, {_FULL} are")
    kinds = [_FULL] * len(types)
    sizes = {name: default if raw.get(field) is None else raw[field] for name, (field, default) in _SIZES.items()}
    delta = DeltaConfig(**sizes)
    return DecoderConfig(
        **decoder_fields(
            {"head_dim": 256, "num_key_value_heads": 4, **raw, "mlp_bias": False},
            max_position_embeddings=32768,
            partial=0.25,
        ),
        layer_windows=layer_windows({**raw, "layer_types": kinds}, kinds, None),
        mixers=tuple(delta if name == _LINEAR else ATTENTION for name in types),
    )


def _layer_types(raw: Mapping[str, Any]) -> list[str]:
    """Return each layer's type: by default the last of each `full_attention_interval` attends to all tokens."""
    if raw.get("layer_types") is not None:
        return list(raw["layer_types"])
    interval = raw.get("full_attention_interval") or 4
    return [_LINEAR if (index + 1) % interval else _FULL for index in range(raw["num_hidden_layers"])]


PARTS = Parts(norm=NormStyle(offset=1.0, rounds_first=False), head_norms="heads", gated_attention=True)
WRAPPER = Wrapper(
    model_type="qwen3_5",
    text_types=("qwen3_5_text",),
    others=("visual.", "mtp."),
    text_path=TEXT_PATH,  # AutoModelForCausalLM loads the text model alone
    tied=False,
    tower=with_tower,
)
register(Family(model_type="qwen3_5_text", config_from_hf=config_from_hf, parts=PARTS))
wrap(WRAPPER)
spell(Spelling(model_type="qwen3_5_text", others=("mtp.",)))
