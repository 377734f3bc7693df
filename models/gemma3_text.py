"""Gemma 3: norms of heads, and windows in five layers of six, with a rotary embedding of their own."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.gemma2 import NORMS, gemma_fields
from jaxglue.models.hf_fields import layer_types, layer_windows, ropes_by_type, window_pattern
from jaxglue.models.siglip import with_tower
from jaxglue.models.wrapper import Wrapper, wrap

_POSITIONS = 131_072


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Gemma3ForCausalLM` config.json, whose `rope_theta` and `rope_scaling` are those of full attention.

    A cap of scores (`attn_logit_softcapping`) counts for nothing, as in transformers.
    """
    thetas = {
        "full_attention": raw.get("rope_theta") or 1_000_000.0,
        "sliding_attention": raw.get("rope_local_base_freq") or 10_000.0,
    }
    ropes = ropes_by_type(raw, thetas, max_position_embeddings=_POSITIONS)
    fields = gemma_fields(
        raw,
        max_position_embeddings=_POSITIONS,
        rope=ropes["full_attention"],
        logit_softcap=raw.get("final_logit_softcapping"),
    )
    every = window_pattern(raw, 6)
    types = [
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(raw["num_hidden_layers"])
    ]
    return DecoderConfig(
        **fields,
        layer_windows=layer_windows(raw, types, raw.get("sliding_window", 4096)),
        layer_ropes=tuple(ropes[kind] for kind in layer_types(raw, types)),
    )


register(Family(model_type="gemma3_text", config_from_hf=config_from_hf, parts=Parts(**NORMS, head_norms="heads")))
wrap(
    Wrapper(
        model_type="gemma3",
        text_types=("gemma3_text",),
        others=("vision_tower.", "multi_modal_projector."),
        tied=True,
        tower=with_tower,
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    )
)
