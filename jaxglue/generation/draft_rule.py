"""How many tokens to draft for a step: as many as save time, by what steps read and how many drafts are accepted."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxglue.generation.drafts import HEAD, WORDS
from jaxglue.generation.pages import state_bytes, token_bytes
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import Params

_log = logging.getLogger(__name__)
ROWS_AS_LONG = 256
"""Rows of which multiplying takes as long as reading the weights, sampling included.

Measured on an H200 (`generation_h200.json`): Qwen3-8B takes 4.2 ms for one sequence and 14 for 256, of which reading
their keys and values takes 6.
"""
DRAFTED_AS_LONG, DRAFTED_BYTES = 135, 1e9
"""The same of rows that verify drafts, and bytes that are read in the time that a step with drafts takes beside.

Measured on an H200 (`drafts.json`, `drafts_many.json`): with a draft each, a step of Qwen3.5-9B takes 0.5 ms more for
one sequence, 3.4 for 64 and 10.8 for 256, where reading its weights takes 4.3.
"""
_PRIOR, _STEPS = 0.7, 4.0
"""Share of drafts that are accepted before any was seen, and the steps that this counts as."""
_KEPT = 0.95
"""Weight of earlier windows' steps after each further one, so that texts that drafts fail on are tried again."""
_LEAST = 1.02
"""Speed, in that of no drafts, from which drafts are made."""


Seconds = Callable[[int], float | None]
"""Returns the seconds of a window with so many drafts; None where none was timed lately."""


class DraftChoice(NamedTuple):
    """Tokens to draft for each step of a window."""

    drafts: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes that a step of a model with a draft head reads; the time of a step is proportional to them."""

    weights: float
    """Weights that each step reads whole: all but experts that tokens choose."""
    experts: float
    """Weights of those."""
    chosen: float
    """Share of them that one token chooses."""
    head: float
    """The draft head's layer."""
    vocabulary: float
    """Rows of the output projection that a draft reads."""
    token: float
    """Keys and values of a token, of all layers."""
    states: float
    """States of a sequence, of recurrent layers."""

    @classmethod
    def of(cls, config: DecoderConfig, trees: tuple[Params, ...], output: str, dtype: Any) -> "StepBytes":
        """Measure a model's parameters with those of its draft head; `output` is the projection to tokens."""
        sizes = {name: sum(_bytes(tree[name]) for tree in trees) for name in trees[0]}
        moe, experts = config.moe, 0.0
        if moe is not None:
            layers = [config.layer_kinds[i].sparse for i in range(config.num_hidden_layers)]
            matrices = 3 * config.hidden_size * moe.num_experts * moe.intermediate_size
            experts = float(sum(layers) * matrices * np.dtype(dtype).itemsize)
        embedding = 0 if output == "embed_tokens" else sizes["embed_tokens"]
        words = sizes.pop(WORDS, None)
        whole = sum(sizes.values()) - sizes[HEAD] - embedding
        experts = min(experts, whole)
        return cls(
            weights=whole - experts,
            experts=experts,
            chosen=1.0 if moe is None else moe.num_experts_per_tok / moe.num_experts,
            head=sizes[HEAD],
            vocabulary=sizes[output] if words is None else words,
            token=token_bytes(config, dtype),
            states=state_bytes(config, dtype),
        )

    def of_step(self, streams: int, drafts: int, context: float) -> float:
        """Return the bytes of a step, with the time of multiplying as if it were bytes.

        Args:
            streams: sequences that decode.
            drafts: of each.
            context: tokens of a sequence, on average.
        """
        rows = streams * (drafts + 1)
        weights = self.weights + self.experts * (1 - (1 - self.chosen) ** rows)
        as_long = streams / ROWS_AS_LONG + streams * drafts / DRAFTED_AS_LONG
        multiplied = (self.weights + self.chosen * self.experts) * as_long
        own = rows * context * self.token + 2 * streams * self.states  # rows read keys and values of their own
        made = (self.head + drafts * self.vocabulary) * (1 + streams / ROWS_AS_LONG) + DRAFTED_BYTES
        return weights + multiplied + own + (made if drafts else 0.0)


class DraftRule:
    """Chooses the drafts of a batch's windows; equal answers before lead to equal choices.

    Args:
        step: bytes of a step.
        most: drafts of a step, at most.
    """

    def __init__(self, step: StepBytes, most: int):
        self._step = step
        self._tried, self._accepted = np.zeros(most), np.zeros(most)

    @property
    def acceptance(self) -> list[float]:
        """Return the shares of accepted first, second, … drafts, among those whose predecessors are accepted."""
        shares, before = [], _PRIOR
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            before = float((accepted + before * _STEPS) / (tried + _STEPS))
            shares.append(before)
        return shares

    def note(self, steps: Int[np.ndarray, " rows"]) -> None:
        """Note a window: how many of its steps chose at least 1, 2, … tokens, one more than there were drafts."""
        self._tried *= _KEPT
        self._accepted *= _KEPT
        drafts = len(steps) - 1
        self._tried[:drafts] += steps[:-1]
        self._accepted[:drafts] += steps[1:]

    def choose(self, streams: int, context: float, seconds: Seconds = lambda drafts: None) -> DraftChoice:
        """Return how many drafts answer soonest.

        Args:
            streams, context: as of `StepBytes.of_step`.
            seconds: of a window with so many drafts, where such were timed, which then stand for the bytes.
        """
        shares, found = self.acceptance, [(1.0, 0)]
        for drafts in range(1, len(shares) + 1):
            tokens = 1 + float(np.cumprod(shares[:drafts]).sum())
            with_drafts, without = seconds(drafts), seconds(0)
            if with_drafts is None or without is None:
                with_drafts, without = (self._step.of_step(streams, count, context) for count in (drafts, 0))
            found.append((tokens * without / with_drafts, drafts))
        speed, drafts = max(found, key=lambda pair: (pair[0], -pair[1]))
        best = max(found[1:])
        if speed < _LEAST:
            return DraftChoice(0, f"{_reason(streams, best[1], shares, best[0])}, so none are made")
        return DraftChoice(drafts, _reason(streams, drafts, shares, speed))


@dataclass
class DraftCounts:
    """Numbers of drafted tokens, and of those that were accepted."""

    made: int = 0
    accepted: int = 0
    said: bool = False
    """The first choice of their number has been logged."""


class DraftPace:
    """Decides on the drafts of a batch's windows, and counts them.

    Args:
        rule: that chooses; None for always the most.
        most: drafts of a step, at most; 0 without a head.
        counts: of all batches.
        waits: windows with other drafts than the last ones' wait for their programs, as in a process that answers once,
            so that equal answers come of equal windows.
    """

    def __init__(self, rule: DraftRule | None, most: int, counts: DraftCounts, *, waits: bool = True):
        self.waits = waits
        self._rule, self._counts, self._most = rule, counts, most
        self.usual = most if rule is None else 0
        """Drafts of the windows whose programs are there first."""

    def choose(self, streams: int, context: float, seconds: Seconds) -> int:
        """Return the drafts of a step; arguments as of `DraftRule.choose`.

        Where equal answers are to come of equal windows, no times are asked for.
        """
        if self._rule is None:
            return self._most
        choice = self._rule.choose(streams, context) if self.waits else self._rule.choose(streams, context, seconds)
        if not self._counts.said:
            self._counts.said = True
            _log.info("drafts: %s", choice.reason)
        return choice.drafts

    def note(self, steps: Int[np.ndarray, " rows"]) -> None:
        """Count a window's drafts; see `accepted`."""
        self._counts.made += int(steps[0]) * (len(steps) - 1)
        self._counts.accepted += int(steps[1:].sum())
        if self._rule is not None:
            self._rule.note(steps)


def _reason(streams: int, drafts: int, shares: list[float], speed: float) -> str:
    accepted = ", ".join(f"{share:.0%}" for share in shares[:drafts])
    return f"{streams} at a time, {drafts} a step with {accepted} accepted are expected to decode {speed:.2f} × as fast"


def _bytes(tree: Any) -> float:
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))
