"""Rotary position embeddings: tables once per batch from packed positions, for each kind of layer."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxglue.ops.backend import Reads

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),  # changes nothing within max_position_embeddings, beyond which no row or text goes
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
}
_LONG_CONTEXT = ("llama3", "yarn", "longrope")
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
    "partial_rotary_factor": 0,
}
"""Bounds of the numbers; each must be larger, but mscale may be 0, which means none."""
_LEAST, _MOST = 1e-12, 1e12
"""Bounds of every number, far from those of published models: products of some remain finite."""

_BETWEEN = f"one from {_LEAST:g} to {_MOST:g}"
_LISTS = ("short_factor", "long_factor")

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
    partial_rotary_factor: float = field(default=1.0, repr=False)
    """Share of a head's dimensions that turn, the first ones. Digests of older runs' `repr` have no such field."""
    interleaved: bool = field(default=False, repr=False)
    """Pairs are neighboring dimensions (2i, 2i + 1), not those of two halves (i, i + half)."""
    short_factor: tuple[float, ...] | None = field(default=None, repr=False)
    """Divisors of the frequencies in documents within `original_max_position_embeddings`, of longrope."""
    long_factor: tuple[float, ...] | None = field(default=None, repr=False)
    """Divisors in longer documents."""
    query_scale: tuple[float, int] | None = field(default=None, repr=False)
    """(β, L): rotated queries at position p are scaled by 1 + β·ln(1 + ⌊p / L⌋); None for no scale."""
    sections: tuple[int, int, int] | None = field(default=None, repr=False)
    """Frequencies that turn with a token's position by time, height and width (M-RoPE); None for time alone."""

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
        cls,
        raw: Mapping[str, Any],
        *,
        theta: float = 10_000.0,
        max_position_embeddings: int = 2048,
        partial: float | None = None,
        interleaved: bool = False,
    ) -> "RopeConfig":
        """Read `rope_scaling` (transformers 4), which wins as in transformers 5, or `rope_parameters` of a config.json.

        Args:
            raw: config.json.
            theta: the family's `rope_theta` where config.json has none.
            max_position_embeddings: the family's likewise, which stands for `original_max_position_embeddings`.
            partial: the family's `partial_rotary_factor` likewise; None for families that turn whole heads.
            interleaved: the family turns neighboring dimensions.

        Raises:
            ValueError: an unsupported rope type, missing or wrong parameters, or partial rotation of whole heads.
        """
        scaling = {name: value for name, value in _scaling(raw).items() if value is not None}
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        top = {name: raw[name] for name in _TOP_LEVEL if raw.get(name) is not None}
        scaling = {"rope_theta": theta, "partial_rotary_factor": partial or 1.0} | top | scaling
        if scaling["rope_type"] in _LONG_CONTEXT:
            limit = raw.get("max_position_embeddings") or max_position_embeddings
            original = raw.get(_ORIGINAL) or scaling.get(_ORIGINAL) or limit  # the top level wins, in transformers too
            scaling[_ORIGINAL] = original
            numbers = all(type(value) in (int, float) and value > 0 for value in (limit, original))
            if scaling["rope_type"] == "longrope" and numbers:
                scaling.setdefault("factor", limit / original)
        for name in _LISTS:
            if isinstance(scaling.get(name), list):
                scaling[name] = tuple(scaling[name])
        if partial is None and scaling["partial_rotary_factor"] != 1.0 and scaling["rope_type"] != "proportional":
            raise ValueError(f"partial_rotary_factor={scaling['partial_rotary_factor']} is not supported: only 1.0 is")
        if (sections := scaling.pop("mrope_section", None)) is not None:
            scaling["sections"] = _sections(sections)
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in scaling.items() if name in names} | {"interleaved": interleaved})

    def axes(self, half: int) -> Int[np.ndarray, " half"]:
        """Return whether each of `half` frequencies turns with time (0), height (1) or width (2), in turns."""
        axes = np.zeros(half, np.int32)
        for axis in (1, 2):
            axes[axis : 3 * (self.sections or (0, 0, 0))[axis] : 3] = axis
        return axes

    def check_width(self, head_dim: int) -> None:
        """Raise ValueError for lists of factors with other than one entry for each pair of dimensions that turns."""
        half = Rotary(self, head_dim).dims // 2
        for name in _LISTS:
            if (values := getattr(self, name)) is not None and self.rope_type == "longrope" and len(values) != half:
                raise ValueError(
                    f"{name} in config.json's rope parameters has {len(values)} entries, expected {half}, half of the "
                    "dimensions of a head that turn"
                )

    def _check_values(self) -> None:
        """Raise ValueError for values of another type or outside their range."""
        for name, above in _ABOVE.items():
            value = getattr(self, name)
            absent = value is None or (value == 0 and name.startswith("mscale"))
            if not absent and not (type(value) in (int, float) and above < value and _LEAST <= value <= _MOST):
                wanted = f"a number > {above}" if type(value) not in (int, float) or value <= above else _BETWEEN
                raise ValueError(f"{name} in config.json's rope parameters: expected {wanted}, got {value!r:.100}")
        for name in _LISTS:
            values = getattr(self, name)
            numbers = isinstance(values, tuple) and all(
                type(x) in (int, float) and _LEAST <= x <= _MOST for x in values
            )
            if values is not None and not numbers:
                raise ValueError(
                    f"{name} in config.json's rope parameters: expected numbers > 0, got {str(values)[:100]}"
                )
        if self.partial_rotary_factor > 1:
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor} in config.json must be at most 1")
        if not isinstance(self.truncate, bool):
            raise ValueError(
                f"truncate in config.json's rope parameters: expected true or false, got {self.truncate!r}"
            )
        if self.rope_type == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ValueError("low_freq_factor and high_freq_factor in config.json's rope parameters must differ")


def _sections(value: Any) -> tuple[int, ...]:
    counts = isinstance(value, list | tuple) and len(value) == 3 and all(type(x) is int and x >= 0 for x in value)
    if not counts:
        raise ValueError(
            f"mrope_section in config.json's rope parameters: expected 3 whole numbers, got {value!r:.100}"
        )
    return tuple(value)


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


class Rotary(NamedTuple):
    """Rotary embedding of a kind of layer."""

    config: RopeConfig
    head_dim: int

    @property
    def dims(self) -> int:
        """Return the number of a head's dimensions that turn, if only by angle 0."""
        if self.config.rope_type == "proportional":
            return self.head_dim
        return int(self.head_dim * self.config.partial_rotary_factor)

    @property
    def turns_whole_halves(self) -> bool:
        """Return whether all of a head turns, its first half with its second."""
        return self.dims == self.head_dim and not self.config.interleaved


TABLES_READ: Reads = {
    Rotary: ("config", "head_dim"),
    RopeConfig: (
        "rope_type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "partial_rotary_factor",
        "short_factor",
        "long_factor",
        "sections",
    ),
}
"""Read by kernels that turn both halves of a head by a batch's tables: what these tell."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of a batch's tokens, for each rotary embedding among a model's layers."""

    rotaries: tuple[Rotary, ...] = field(metadata={"static": True})
    tables: tuple[tuple[Float[Array, "B T half"], Float[Array, "B T half"]], ...]
    query_scales: tuple[Float[Array, "B T"] | None, ...] = ()
    """Factors of rotated queries, None for embeddings without."""

    @classmethod
    def at(
        cls, positions: Int[Array, "B T *axes"], rotaries: Sequence[Rotary], lengths: Int[Array, "B T"] | None = None
    ) -> "RopeTables":
        """Compute the tables of tokens at these positions, in documents of these lengths; None for short ones.

        Positions of models that see images are by time, height and width, [B, T, 3].
        """
        return cls(
            tuple(rotaries),
            tuple(rope_tables(positions, *rotary, lengths=lengths) for rotary in rotaries),
            tuple(query_scales(positions if positions.ndim == 2 else positions[..., 0], r.config) for r in rotaries),
        )

    def of(self, rotary: Rotary) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
        """Return (cosines, sines) of one of the embeddings."""
        return self.tables[self.rotaries.index(rotary)]

    def scales(self, rotary: Rotary) -> Float[Array, "B T"] | None:
        """Return the factors of one of the embeddings' rotated queries; None for none."""
        return self.query_scales[self.rotaries.index(rotary)] if self.query_scales else None

    def scale_queries(self, q: Float[Array, "B T N H"], rotary: Rotary) -> Float[Array, "B T N H"]:
        """Return rotated queries times their factors, in their dtype."""
        scales = self.scales(rotary)
        return q if scales is None else q * scales[..., None, None].astype(q.dtype)


def query_scales(positions: Int[Array, "B T"], config: RopeConfig) -> Float[Array, "B T"] | None:
    """Return the factors of rotated queries at these positions; None for no scale."""
    if config.query_scale is None:
        return None
    beta, length = config.query_scale
    return 1 + beta * jnp.log1p((positions // length).astype(jnp.float32))


def inverse_frequencies(config: RopeConfig, head_dim: int, *, long: bool = False) -> tuple[np.ndarray, float]:
    """Return inverse frequencies [half] in radians per token, float64, and the factor on cos and sin.

    Half of the dimensions that turn, `Rotary.dims`; `long` for documents beyond the original context of longrope.
    """
    head_dim = Rotary(config, head_dim).dims
    plain = config.rope_theta ** -(np.arange(0, head_dim, 2) / head_dim)
    match config.rope_type:
        case "linear":
            assert config.factor
            return plain / config.factor, 1.0
        case "llama3":
            return _llama3_frequencies(plain, config), 1.0
        case "yarn":
            return _yarn_frequencies(plain, config, head_dim), _yarn_attention_factor(config)
        case "proportional":  # the later ones' frequencies are 0
            turning = int(config.partial_rotary_factor * head_dim // 2)
            return plain * (np.arange(head_dim // 2) < turning) / (config.factor or 1.0), 1.0
        case "longrope":
            return plain / np.array(config.long_factor if long else config.short_factor), _longrope_factor(config)
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


def _longrope_factor(config: RopeConfig) -> float:
    """Return the factor on cos and sin of both kinds of documents (LongRoPE, arXiv 2402.13753)."""
    factor, original = config.factor, config.original_max_position_embeddings
    if config.attention_factor is not None:
        return config.attention_factor
    assert factor and original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def rope_tables(
    positions: Int[Array, "B T *axes"],
    config: RopeConfig,
    head_dim: int,
    *,
    lengths: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Compute cosines and sines in float32 for every token of the batch; see `inverse_frequencies`.

    Args:
        positions: of the tokens in their documents; by time, height and width where each frequency has one of these.
        config: the rotary embedding.
        head_dim: H.
        lengths: of the tokens' documents, by which longrope chooses its factors, so that packing changes nothing; None
            where all are within the original context.
    """
    inverse, attention_factor = inverse_frequencies(config, head_dim)
    frequencies = jnp.asarray(inverse, jnp.float32)
    if config.rope_type == "longrope" and lengths is not None:
        assert config.original_max_position_embeddings
        long = jnp.asarray(inverse_frequencies(config, head_dim, long=True)[0], jnp.float32)
        frequencies = jnp.where((lengths > config.original_max_position_embeddings)[..., None], long, frequencies)
    positions = positions[..., config.axes(len(inverse))] if positions.ndim == 3 else positions[..., None]
    angles = positions.astype(jnp.float32) * frequencies
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rope(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotate the first 2·half dimensions of every head in float32; return x's dtype.

    Pairs are dimensions (i, i + half), or (2i, 2i + 1) where they are interleaved.
    """
    turned = 2 * cos.shape[-1]
    rotated = x if turned == x.shape[-1] else x[..., :turned]
    left, right = _pairs(rotated.astype(jnp.float32), interleaved)
    cos, sin = cos[:, :, None], sin[:, :, None]
    pairs = [left * cos - right * sin, right * cos + left * sin]
    out = jnp.stack(pairs, axis=-1).reshape(rotated.shape) if interleaved else jnp.concatenate(pairs, axis=-1)
    out = out.astype(x.dtype)
    return out if rotated is x else jnp.concatenate([out, x[..., turned:]], axis=-1)


def _pairs(x: Float[Array, "B T N even"], interleaved: bool) -> tuple[Float[Array, "B T N half"], ...]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    left, right = jnp.split(x, 2, axis=-1)
    return left, right
