"""Hunyuan (dense): norms of heads behind the rotation, whose base a factor α stretches."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.hf_fields import decoder_fields
from jaxglue.models.wrapper import Spelling, spell

_MOST = 1e12


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `HunYuanDenseV1ForCausalLM` config.json, where α makes rotation of type `dynamic` a fixed one.

    Raises:
        ValueError: a field missing or not supported, or an α that is no number.
    """
    rope: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    given, kind = dict(raw), rope.get("rope_type") or rope.get("type")
    if kind == "dynamic" and (alpha := rope.get("alpha")):
        theta, width = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0, raw.get("head_dim") or 0
        for name, value in (("alpha", alpha), ("rope_theta", theta)):
            if type(value) not in (int, float) or not 0 < value <= _MOST or width <= 2:
                raise ValueError(
                    f"hunyuan_v1_dense with alpha in config.json needs numbers up to {_MOST:g} and head_dim above 2, "
                    f"got {name}={value!r:.40}"
                )
        theta *= alpha ** (width / (width - 2))
        given |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    fields = decoder_fields({**given, "mlp_bias": False}, eps=1e-5)
    return DecoderConfig(**fields, layer_windows=(None,) * raw["num_hidden_layers"])


register(Family(model_type="hunyuan_v1_dense", config_from_hf=config_from_hf, parts=Parts(head_norms="turned")))
spell(
    Spelling(
        model_type="hunyuan_v1_dense",
        parts=((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")),
    )
)
