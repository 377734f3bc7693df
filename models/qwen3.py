"""Qwen3 (dense): norms on queries and keys, optional sliding windows."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig, decoder_fields, layer_windows
from jaxglue.models.family import Family, Parts, register


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3ForCausalLM` config.json."""
    return DecoderConfig(
        **decoder_fields({"head_dim": 128, **raw}, max_position_embeddings=32768), layer_windows=_windows(raw)
    )


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the layers' windows; with `use_sliding_window`, layers from `max_window_layers` on slide."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    first = 28 if (given := raw.get("max_window_layers")) is None else given
    types = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(raw["num_hidden_layers"])
    ]
    return layer_windows(raw, types, window)


register(Family(model_type="qwen3", config_from_hf=config_from_hf, parts=Parts(head_norms="heads")))
