"""Qwen3 (dense): norms on queries and keys, optional sliding windows."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxglue.models.config import DecoderConfig, decoder_fields, layer_windows
from jaxglue.models.decoder import CausalLM
from jaxglue.models.layers import DecoderLayer


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3ForCausalLM` config.json."""
    return DecoderConfig(
        **decoder_fields({"head_dim": 128, **raw}, max_position_embeddings=32768), layer_windows=_windows(raw)
    )


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the layers' windows; with `use_sliding_window`, layers from `max_window_layers` on slide."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    first = 28 if (given := raw.get("max_window_layers")) is None else given
    types = raw.get("layer_types") or [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(raw["num_hidden_layers"])
    ]
    return layer_windows(raw, types, window)


def build(config: DecoderConfig, *, dtype, rngs: nnx.Rngs) -> CausalLM:
    """Build a Qwen3 with random weights in `dtype`."""

    def make_layer(index: int) -> DecoderLayer:
        return DecoderLayer(config, qk_norm=True, kind=config.layer_kinds[index], dtype=dtype, rngs=rngs)

    return CausalLM(config, make_layer, dtype=dtype, rngs=rngs)
