"""OLMo 3: OLMo 2 with sliding windows, whose layers have a rotary embedding of their own."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields, layer_types, layer_windows, ropes_by_type
from jaxglue.models.olmo2 import PARTS


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Olmo3ForCausalLM` config.json, whose `rope_theta` and `rope_scaling` are those of full attention."""
    thetas = {"full_attention": raw.get("rope_theta") or 500_000.0, "sliding_attention": 500_000.0}
    ropes = ropes_by_type(raw, thetas, max_position_embeddings=2048)
    fields = decoder_fields(raw, eps=1e-5, rope=ropes["full_attention"]) | {"mlp_bias": False}
    types = ["sliding_attention" if (index + 1) % 4 else "full_attention" for index in range(raw["num_hidden_layers"])]
    return DecoderConfig(
        **fields,
        layer_windows=layer_windows(raw, types, raw.get("sliding_window", 4096)),
        layer_ropes=tuple(ropes[kind] for kind in layer_types(raw, types)),
    )


register(Family(model_type="olmo3", config_from_hf=config_from_hf, parts=PARTS))
