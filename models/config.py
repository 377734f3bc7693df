"""A decoder's shape, read from Hugging Face's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxglue.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder-only transformer; the fields carry Hugging Face's names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    layer_windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, None for full attention."""

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of dimensions")
        assert len(self.layer_windows) == self.num_hidden_layers


def decoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that all families read alike from config.json.

    Raises:
        ValueError: a needed field is missing, or the activation or rope type is not supported.
    """
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported for {raw['model_type']}: only 'silu' is")
    heads = raw["num_attention_heads"]
    return {
        **{name: raw[name] for name in needed},
        "model_type": raw["model_type"],
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "attention_bias": raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "initializer_range": raw.get("initializer_range", 0.02),
        "rope": RopeConfig.from_hf(raw),
    }
