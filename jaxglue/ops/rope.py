"""Rotary position embeddings: tables once per batch from packed positions, applied in every layer."""

import logging
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
_LONG_CONTEXT = ("llama3", "yarn")
_ORIGINAL = "original_max_position_embeddings"
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor")
_ABOVE: dict[str, float] = {
    "rope_theta": 1,
    "factor": 0,
    "low_freq_factor": 0,
    "high_freq_factor": 0,
    _ORIGINAL: 0,
    "attention_factor": 0,
    "beta_fast": 0,
    "beta_slow": 0,
    "mscale": 0,
    "mscale_all_dim": 0,
}
"""Bounds of the numbers; each must be larger, but mscale may be 0, which means none."""

_log = logging.getLogger(__name__)


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
        self._check_values()
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope type {self.rope_type!r} is not supported: known are {', '.join(ROPE_TYPES)}")
        missing = [name for name in _REQUIRED[self.rope_type] if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"rope type {self.rope_type!r} needs {', '.join(missing)} in config.json's rope parameters"
            )

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], *, theta: float = 10_000.0, max_position_embeddings: int = 2048
    ) -> "RopeConfig":
        """Read `rope_scaling` (transformers 4), which wins as in transformers 5, or `rope_parameters` of a config.json.

        Args:
            raw: config.json.
            theta: the family's `rope_theta` where config.json has none.
            max_position_embeddings: the family's likewise, which stands for `original_max_position_embeddings`.

        Raises:
            ValueError: an unsupported rope type, missing or wrong parameters, or partial rotation.
        """
        given = {name: value for name, value in _scaling(raw).items() if value is not None}
        given.setdefault("rope_type", given.pop("type", "default"))
        top = {name: raw[name] for name in _TOP_LEVEL if raw.get(name) is not None}
        given = {"rope_theta": theta, "partial_rotary_factor": 1.0} | top | given
        if given["rope_type"] in _LONG_CONTEXT:
            limit = raw.get("max_position_embeddings") or max_position_embeddings
            original = raw.get(_ORIGINAL) or given.get(_ORIGINAL) or limit  # the top level wins, in transformers too
            given[_ORIGINAL] = original
        if given["partial_rotary_factor"] != 1.0:
            raise ValueError(f"partial_rotary_factor={given['partial_rotary_factor']} is not supported: only 1.0 is")
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})

    def _check_values(self) -> None:
        """Raise ValueError for values of another type or outside their range."""
        for name, above in _ABOVE.items():
            value = getattr(self, name)
            absent = value is None or (value == 0 and name.startswith("mscale"))
            if not absent and not (type(value) in (int, float) and above < value < float("inf")):
                raise ValueError(f"{name} in config.json's rope parameters: expected a number > {above}, got {value!r}")
        if not isinstance(self.truncate, bool):
            raise ValueError(
                f"truncate in config.json's rope parameters: expected true or false, got {self.truncate!r}"
            )
        if self.rope_type == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ValueError("low_freq_factor and high_freq_factor in config.json's rope parameters must differ")


def _scaling(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_scaling`, else `rope_parameters`; warn where the first hides another `rope_theta` of the second."""
    both = [raw.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if wrong := [value for value in both if not isinstance(value, Mapping)]:
        raise ValueError(f"rope_scaling and rope_parameters in config.json: expected an object, got {wrong[0]!r}")
    scaling, parameters = both
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError(
            f"rope_parameters by layer type ({', '.join(parameters)}) are not supported: only one for all is"
        )
    hidden = parameters.get("rope_theta")
    if scaling and hidden is not None and hidden != scaling.get("rope_theta", raw.get("rope_theta")):
        _log.warning("config.json has rope_scaling, so the rope_theta %s of rope_parameters is unused", hidden)
    return scaling or parameters


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
