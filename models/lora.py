"""Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers and experts."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from flax import nnx

from jaxglue.config import Alias, Config, PositiveInt, Range, nearest
from jaxglue.models.decoder import CausalLM
from jaxglue.models.layers import Linear
from jaxglue.models.moe_layers import ExpertLinear

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Targets, rank and scale of the adapters."""

    rank: Annotated[PositiveInt, Alias("lora_r", "lora_rank", "r")] = 16
    """Rank R of each adapter."""
    alpha: Annotated[float, Alias("lora_alpha")] = 16.0
    """Scale adapter outputs by alpha / rank."""
    dropout: Annotated[float, Range(ge=0, lt=1), Alias("lora_dropout")] = 0.0
    """Dropout probability on adapter inputs during training."""
    rslora: Annotated[bool, Alias("use_rslora", "lora_use_rslora", "peft_use_rslora")] = False
    """Scale by alpha / √rank instead (rsLoRA, arXiv 2312.03732)."""
    targets: Annotated[
        tuple[str, ...],
        Alias("target_modules", "lora_target_modules", "lora_target"),
        Alias("lora_target_linear", values={True: (ALL_LINEAR,)}),
    ] = (ALL_LINEAR,)
    """Linear layers to adapt, such as q_proj, the experts' gate_up_proj and down_proj, or the end of a path, such
    as 3.self_attn.q_proj; all-linear selects every one in the decoder layers, including experts, excluding routers."""
    rank_pattern: tuple[str, ...] = ()
    """Other ranks of some layers, such as down_proj=32: a regular expression for the end of the path, as PEFT's."""
    alpha_pattern: tuple[str, ...] = ()
    """Other alphas of some layers, likewise."""

    def validate(self) -> None:
        """Refuse adapters on nothing, and malformed patterns."""
        if not self.targets:
            raise ValueError("targets is empty: name linear layers, or use all-linear")
        for pattern, value in parse_patterns("rank_pattern", self.rank_pattern).items():
            if not (value.is_integer() and value >= 1):
                raise ValueError(f"rank_pattern: expected a whole number >= 1 for {pattern}, got {value}")
        parse_patterns("alpha_pattern", self.alpha_pattern)

    @property
    def scale(self) -> float:
        """Return the factor on the adapter's output, where no pattern gives another."""
        return self._scale(self.rank, self.alpha)

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / (rank**0.5 if self.rslora else rank)

    def rank_of(self, path: str) -> int:
        """Return the rank of the adapter of a module, such as `model.layers.0.self_attn.q_proj`."""
        found = match_pattern(parse_patterns("rank_pattern", self.rank_pattern), path)
        return self.rank if found is None else int(found)

    def scale_of(self, path: str) -> float:
        """Return the factor on the output of a module's adapter."""
        found = match_pattern(parse_patterns("alpha_pattern", self.alpha_pattern), path)
        return self._scale(self.rank_of(path), self.alpha if found is None else found)


def parse_patterns(field: str, entries: Iterable[str]) -> dict[str, float]:
    """Return the number of each pattern of `PATTERN=NUMBER` entries.

    Raises:
        ValueError: not of this form, a number that is not finite, or not a regular expression.
    """
    patterns = {}
    for entry in entries:
        pattern, _, number = entry.rpartition("=")
        try:
            patterns[pattern] = float(number)
            re.compile(pattern)
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{field}: expected PATTERN=NUMBER, got {entry!r:.100} ({error})") from None
        if not pattern or not math.isfinite(patterns[pattern]):
            raise ValueError(f"{field}: expected PATTERN=NUMBER, got {entry!r:.100}")
    return patterns


def match_pattern(patterns: Mapping[str, float], path: str) -> float | None:
    """Return the number of the first pattern that matches the end of a path, at a dot, as PEFT does; None if none."""
    return next((number for pattern, number in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path)), None)


def is_target(path: str, target: str) -> bool:
    """Tell whether a target names the module of this path, in full or by its end, as PEFT does."""
    return path == target or path.endswith(f".{target}")


def add_lora(model: CausalLM, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Add an adapter in place to every targeted linear layer and expert projection of the decoder layers.

    Raises:
        ValueError: a target or pattern that names none of them, or dropout or patterns on experts.
    """
    linears = dict(linear_layers(model))
    _check_names(config, list(linears))
    for path, linear in linears.items():
        if not any(target == ALL_LINEAR or is_target(path, target) for target in config.targets):
            continue
        rank, scale, kind = config.rank_of(path), config.scale_of(path), path.rpartition(".")[-1]
        if isinstance(linear, ExpertLinear) and (rank, scale) != (config.rank, config.scale):
            raise ValueError(f"rank_pattern and alpha_pattern on experts ({path}) are not supported: leave them out")
        linear.add_lora(rank=rank, scale=scale, dropout=config.dropout, name=kind, rngs=rngs)


def _check_names(config: LoraConfig, paths: list[str]) -> None:
    """Raise ValueError for a target or pattern that matches no path."""
    kinds = sorted({path.rpartition(".")[-1] for path in paths})
    named = [target for target in config.targets if target != ALL_LINEAR]
    if unknown := [target for target in named if not any(is_target(path, target) for path in paths)]:
        hint = nearest(unknown[0], [*kinds, ALL_LINEAR])
        raise ValueError(f"LoRA targets {', '.join(unknown)} do not exist in this model: use {', '.join(kinds)}{hint}")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in parse_patterns(field, getattr(config, field)):
            if not any(match_pattern({pattern: 1}, path) for path in paths):
                raise ValueError(f"{field}: {pattern} matches none of {', '.join(kinds)}{nearest(pattern, kinds)}")


def linear_layers(model: CausalLM) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Yield (path, module) of the decoder layers' linear layers and experts, in model order."""
    for index, layer in enumerate(model.layers):
        for path, module in nnx.iter_modules(layer):
            if isinstance(module, Linear | ExpertLinear):
                yield ".".join(["model", "layers", str(index), *map(str, path)]), module


def linear_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shape [out, in], or [E, out, in], of each linear layer by path; the model may be abstract."""
    return {
        path: (linear.experts, linear.out_features, linear.in_features)
        if isinstance(linear, ExpertLinear)
        else tuple(linear.weight.get_value().shape)
        for path, linear in linear_layers(model)
    }
