"""Rotary position embeddings: tables once per batch from packed positions, applied in every layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary frequencies in the form of Hugging Face configs (`modeling_rope_utils` in transformers)."""

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope type {self.rope_type!r} is not supported: known are {', '.join(ROPE_TYPES)}")
        missing = [name for name in _REQUIRED[self.rope_type] if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"rope type {self.rope_type!r} needs {', '.join(missing)} in config.json's rope parameters"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier) of a config.json.

        Raises:
            ValueError: an unsupported rope type, missing parameters, or partial rotation.
        """
        given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        given.setdefault("rope_type", given.pop("type", "default"))
        given.setdefault("rope_theta", raw.get("rope_theta", cls.rope_theta))
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor={given['partial_rotary_factor']} is not supported: only 1.0 is")
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known and value is not None})


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Return inverse frequencies [head_dim / 2] in radians per token, float64, and the factor on cos and sin."""
    plain = config.rope_theta ** -(np.arange(0, head_dim, 2) / head_dim)
    match config.rope_type:
        case "linear":
            assert config.factor
            return plain / config.factor, 1.0
        case "llama3":
            return _llama3_frequencies(plain, config), 1.0
        case "yarn":
            return _yarn_frequencies(plain, config, head_dim), _yarn_attention_factor(config)
    return plain, 1.0


def _llama3_frequencies(plain: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Stretch long wavelengths by `factor`, keep short ones, blend those between (Llama 3.1)."""
    assert config.factor and config.low_freq_factor and config.high_freq_factor
    assert config.original_max_position_embeddings
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return plain * (keep + (1 - keep) / config.factor)


def _yarn_frequencies(plain: np.ndarray, config: RopeConfig, head_dim: int) -> np.ndarray:
    """Interpolate the slow dimensions and keep the fast ones (YaRN, arXiv 2309.00071)."""
    original = config.original_max_position_embeddings
    assert config.factor and original

    def dimension(turns: float) -> float:
        context = original / (turns * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(config.rope_theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolate = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain * (1 - interpolate + interpolate / config.factor)


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    factor = config.factor
    assert factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def rope_tables(
    positions: Int[Array, "B T"], config: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Compute cosines and sines in float32 for every token of the batch; half = head_dim / 2."""
    frequencies, attention_factor = inverse_frequencies(config, head_dim)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T N H"]:
    """Rotate the two halves of every head in float32; return x's dtype."""
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
