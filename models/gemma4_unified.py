"""Gemma 4 12B: Gemma 4 without embeddings for each layer, without experts, and without a vision tower."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models import gemma4
from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.gemma4_patches import with_patches
from jaxglue.models.wrapper import Wrapper, wrap

_DEFAULTS = {"max_position_embeddings": 262_144, "sliding_window": 1024}
_WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Gemma4UnifiedForCausalLM` config.json; raise ValueError as for Gemma 4."""
    defaults = {name: default for name, default in _DEFAULTS.items() if raw.get(name) is None}
    return gemma4.config_from_hf({**raw, **defaults, **_WITHOUT})


register(
    Family(
        model_type="gemma4_unified_text",
        config_from_hf=config_from_hf,
        parts=gemma4.PARTS,
        layer=gemma4.Gemma4Layer,
    )
)
wrap(
    Wrapper(
        model_type="gemma4_unified",
        text_types=("gemma4_unified_text",),
        others=("vision_embedder.", "embed_vision.", "embed_audio."),
        tied=True,
        defaults=gemma4.SIZES,
        tower=with_patches,
    )
)
