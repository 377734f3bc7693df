"""EXAONE 4: norms of outputs and of heads; layers that attend to all have no positions where others slide."""

from collections.abc import Mapping
from typing import Any

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import Family, NormNames, Parts, register
from jaxglue.models.hf_fields import decoder_fields, layer_types, layer_windows
from jaxglue.models.wrapper import Wrapper, wrap

_NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `Exaone4ForCausalLM` config.json.

    Raises:
        ValueError: a field missing or not supported, or a `sliding_window_pattern` that is no number and no letters.
    """
    fields = decoder_fields({"num_key_value_heads": 32, **raw, **_UNBIASED}, eps=1e-5)
    window, types = raw.get("sliding_window", 4096), _types(raw)
    kinds = layer_types(raw, types)
    return DecoderConfig(
        **fields,
        layer_windows=layer_windows(raw, types, window),
        layer_ropes=tuple(fields["rope"] if window is None or kind == "sliding_attention" else None for kind in kinds),
    )


_UNBIASED = {"attention_bias": False, "mlp_bias": False}


def _types(raw: Mapping[str, Any]) -> list[str]:
    """Return each layer's type where `layer_types` says none: of four the last attends to all, or as letters say."""
    layers, pattern = raw["num_hidden_layers"], raw.get("sliding_window_pattern", 4)
    if raw.get("sliding_window", 4096) is None or not pattern:
        return ["full_attention"] * layers
    letters = "L" * (min(pattern, layers + 1) - 1) + "G" if type(pattern) is int and pattern > 0 else pattern
    if not isinstance(letters, str) or set(letters) - {"L", "G"}:
        raise ValueError(
            f"sliding_window_pattern in config.json: expected a number above 0, or letters L and G, got {pattern!r:.99}"
        )
    types = [letters[layer % len(letters)] for layer in range(layers)]
    if not isinstance(pattern, int):
        types[-1] = "G"  # as the published code does, by letters alone
    return ["sliding_attention" if letter == "L" else "full_attention" for letter in types]


_PARTS = Parts(norms=_NORMS, head_norms="heads")
for _type in ("exaone4", "exaone4_5_text"):
    register(Family(model_type=_type, config_from_hf=config_from_hf, parts=_PARTS))
wrap(Wrapper(model_type="exaone4_5", text_types=("exaone4", "exaone4_5_text"), others=("visual.", "mtp."), tied=False))
