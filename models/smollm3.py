"""SmolLM3: every fourth layer has no rotary embedding."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, register
from jaxglue.models.hf_fields import decoder_fields, layer_windows


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `SmolLM3ForCausalLM` config.json.

    Raises:
        ValueError: a field missing or not supported, or too few `no_rope_layers`.
    """
    given = {"num_key_value_heads": 4, "tie_word_embeddings": True, **raw}
    fields = decoder_fields(given, theta=2_000_000.0, max_position_embeddings=32768)
    layers = fields["num_hidden_layers"]
    if (turns := raw.get("no_rope_layers")) is None:  # 1 where the layer has one, in spite of the name
        turns = [(index + 1) % (raw.get("no_rope_layer_interval") or 4) for index in range(layers)]
    if len(turns) < layers:
        raise ValueError(f"no_rope_layers has {len(turns)} entries for num_hidden_layers={layers}")
    slides = raw.get("use_sliding_window") or raw.get("layer_types") is not None
    window = raw.get("sliding_window") if slides else None
    types = ["full_attention" if window is None or turn else "sliding_attention" for turn in turns[:layers]]
    return DecoderConfig(
        **fields,
        layer_windows=layer_windows(raw, types, window),
        layer_ropes=tuple(fields["rope"] if turn else None for turn in turns[:layers]),
    )


register(Family(model_type="smollm3", config_from_hf=config_from_hf))
