"""Cohere 2 (Command R7B, Command A): attention and feed-forward read one layer norm; sliding layers have positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.models.config import DecoderConfig, Scales
from jaxglue.models.family import Family, NormNames, Parts, register
from jaxglue.models.hf_fields import check_fields, decoder_fields, layer_types, layer_windows, window_pattern
from jaxglue.models.wrapper import Wrapper, wrap
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.settings.config import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class _Fields:
    layer_norm_eps: PositiveFloat
    logit_scale: PositiveFloat


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Cohere2ForCausalLM` config.json.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    eps = 1e-5 if raw.get("layer_norm_eps") is None else raw["layer_norm_eps"]
    given = {"tie_word_embeddings": True, **raw, "rms_norm_eps": eps, "head_dim": None, "mlp_bias": False}
    fields = decoder_fields(given, max_position_embeddings=8192, interleaved=True)
    every, scale = window_pattern(raw, 4), raw.get("logit_scale")
    types = [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(raw["num_hidden_layers"])
    ]
    window, kinds = raw.get("sliding_window", 4096), layer_types(raw, types)
    return DecoderConfig(
        **fields,
        layer_windows=layer_windows(raw, types, window),
        layer_ropes=tuple(
            fields["rope"] if kind == "sliding_attention" and window is not None else None for kind in kinds
        ),
        scales=Scales(logit_divisor=16.0 if scale is None else 1 / scale),
    )


PARTS = Parts(norms=NormNames(before_mlp=None), norm=NormStyle(rounds_first=False, centered=True), parallel=True)
register(Family(model_type="cohere2", config_from_hf=config_from_hf, parts=PARTS))
wrap(
    Wrapper(
        model_type="cohere2_vision",
        text_types=("cohere2",),
        others=("vision_tower.", "multi_modal_projector."),
        tied=True,
    )
)
