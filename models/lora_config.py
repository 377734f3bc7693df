"""Settings of low-rank adapters: targets, ranks and scales."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxglue.data.limits import pattern_time_limit
from jaxglue.settings.config import Alias, CommaSeparated, Config, NonNegativeInt, PositiveInt, Range, Synonyms

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""Stands among exclusions for the projections of all experts."""
VocabularyModule = Literal["embed_tokens", "lm_head"]
MODULES: tuple[VocabularyModule, ...] = ("embed_tokens", "lm_head")
"""Modules with a row for each token, under PEFT's names."""
PATHS: dict[VocabularyModule, str] = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
"""Their paths."""


def is_target(path: str, target: str) -> bool:
    """Tell whether a target names the module of this path, in full or by its end, as PEFT does."""
    return path == target or path.endswith(f".{target}")


def is_excluded(path: str, name: str) -> bool:
    """Tell whether an exclusion names the module of this path."""
    return is_target(path, name) or (name == EXPERTS and EXPERTS in path.split("."))


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Targets, rank and scale of the adapters."""

    rank: Annotated[PositiveInt, Alias("lora_r", "lora_rank", "r")] = 16
    """Rank R of each adapter."""
    alpha: Annotated[float, Alias("lora_alpha")] = 16.0
    """Scale adapter outputs by alpha / rank."""
    dropout: Annotated[float | None, Range(ge=0, lt=1), Alias("lora_dropout")] = None
    """Dropout probability on adapter inputs during training; by default that of --adapter, else 0."""
    rslora: Annotated[bool, Alias("use_rslora", "lora_use_rslora", "peft_use_rslora")] = False
    """Scale by alpha / √rank instead (rsLoRA, arXiv 2312.03732)."""
    targets: Annotated[
        tuple[str, ...],
        Alias("target_modules", "lora_target_modules", "lora_target"),
        Alias("lora_target_linear", values={True: (ALL_LINEAR,)}),
        Synonyms(all=ALL_LINEAR),
        CommaSeparated(),
    ] = (ALL_LINEAR,)
    """Linear layers to adapt, such as q_proj, the experts' gate_up_proj and down_proj, or the end of a path, such
    as 3.self_attn.q_proj; all-linear selects every one in the decoder layers, including experts, excluding routers.
    embed_tokens and lm_head get adapters, too, where they are named; dropout is not for these."""
    exclude: Annotated[tuple[str, ...], Alias("exclude_modules"), CommaSeparated()] = ()
    """Linear layers to leave out of the targets, named as these; experts leaves out those of a mixture's experts, where
    the model has any."""
    layers: Annotated[tuple[NonNegativeInt, ...], Alias("layers_to_transform", "peft_layers_to_transform")] = ()
    """Indices of the decoder layers to adapt; by default all."""
    rank_pattern: tuple[str, ...] = ()
    """Other ranks of some layers, such as down_proj=32: a regular expression for the end of the path, as PEFT's."""
    alpha_pattern: tuple[str, ...] = ()
    """Other alphas of some layers, likewise."""
    dora: Annotated[bool, Alias("use_dora", "peft_use_dora")] = False
    """Also train the norm of each row of weight and adapter (DoRA, arXiv 2402.09353); not of experts."""
    modules_to_save: Annotated[
        tuple[VocabularyModule, ...],
        Alias("lora_modules_to_save", "additional_target"),
        Alias("train_embeddings", values={True: MODULES}),
        CommaSeparated(),
    ] = ()
    """Train these whole beside the adapters: embed_tokens, lm_head or both, which are one where the model ties them."""
    trainable_token_indices: tuple[NonNegativeInt, ...] = ()
    """Train these tokens' rows of embed_tokens and lm_head; --new-tokens adds its own."""
    token_modules: tuple[VocabularyModule, ...] = MODULES
    """Modules whose rows these are."""

    def validate(self) -> None:
        """Refuse adapters on nothing, and malformed patterns."""
        if not self.targets:
            raise ValueError("targets is empty: name linear layers, or use all-linear")
        for pattern, value in parse_patterns("rank_pattern", self.rank_pattern).items():
            if not (value.is_integer() and value >= 1):
                raise ValueError(f"rank_pattern: expected a whole number >= 1 for {pattern}, got {value}")
        parse_patterns("alpha_pattern", self.alpha_pattern)
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        """Refuse adapters of embedding and output projection with settings that are not for them."""
        for name in self.vocabulary_targets:
            rows = self.trainable_token_indices if name in self.token_modules else ()
            refused = {
                "modules_to_save trains it whole": name in self.modules_to_save,
                "trainable_token_indices trains its rows": rows,
                "layers names decoder layers": self.layers,
                "DoRA is of linear layers in these": self.dora,
            }
            if reason := next((reason for reason, holds in refused.items() if holds), ""):
                raise ValueError(f"targets: {name} gets an adapter, and {reason}: leave one of the two out")

    @property
    def vocabulary_targets(self) -> tuple[VocabularyModule, ...]:
        """Return the modules with a row for each token that get adapters."""
        return tuple(name for name, path in PATHS.items() if any(is_target(path, target) for target in self.targets))

    @property
    def is_uniform(self) -> bool:
        """Tell whether targets and patterns name kinds of modules alone, so that all layers have the same adapters."""
        patterns = [parse_patterns(name, getattr(self, name)) for name in ("rank_pattern", "alpha_pattern")]
        names = (name for some in (self.targets, self.exclude, *patterns) for name in some)
        return not self.layers and all(re.fullmatch(r"[\w-]+", name) for name in names)

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


_AT_END = r"(.*\.)?({})$"
"""Pattern of a pattern at the end of a path, at a dot, as PEFT's."""


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
            re.compile(_AT_END.format(pattern))
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{field}: expected PATTERN=NUMBER, got {entry!r:.100} ({error!s:.100})") from None
        if not pattern or not math.isfinite(patterns[pattern]):
            raise ValueError(f"{field}: expected PATTERN=NUMBER, got {entry!r:.100}")
    return patterns


def match_pattern(patterns: Mapping[str, float], path: str) -> float | None:
    """Return the number of the first pattern that matches the end of a path, at a dot, as PEFT does; None if none."""
    with pattern_time_limit():
        return next((number for pattern, number in patterns.items() if re.match(_AT_END.format(pattern), path)), None)
