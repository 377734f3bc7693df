"""OLMo 2: norms of attention's and feed-forward's outputs, and of whole queries and keys."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, NormNames, Parts, register
from jaxglue.models.hf_fields import decoder_fields
from jaxglue.ops.norm_rope import NormStyle

PARTS = Parts(
    norms=NormNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    norm=NormStyle(rounds_first=False),
    head_norms="full",
)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Olmo2ForCausalLM` config.json."""
    fields = decoder_fields(raw, eps=1e-5) | {"mlp_bias": False}
    return DecoderConfig(**fields, layer_windows=(None,) * raw["num_hidden_layers"])


register(Family(model_type="olmo2", config_from_hf=config_from_hf, parts=PARTS))
