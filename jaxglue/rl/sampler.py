"""Answers of the model in training, by the weights that it has now."""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.pages import CachePlan
from jaxglue.generation.scheduler import Request
from jaxglue.models.parameters import Params

_log = logging.getLogger(__name__)
_MANY_STEPS = 1024
"""Decode steps of a run from which a program of all layers, which takes longer to compile, pays."""

_TURN = 1_000_003
"""Separates the seeds of turns."""


class Sample(NamedTuple):
    """An answer."""

    tokens: Int[np.ndarray, " L"]
    """With the token that ended it."""
    log_probs: Float[np.ndarray, " L"]
    """Of the tokens, at the temperature of sampling."""
    ended: bool
    """False for one that reached its longest length."""
    text: str = ""
    """Without special tokens."""
    old: Float[np.ndarray, " L"] | None = None
    """Log-probabilities by training's programs, where several steps are made on the answer."""
    reference: Float[np.ndarray, " L"] | None = None
    """Those of the reference, where the objective has one."""
    counted: Bool[np.ndarray, " L"] | None = None
    """False for tokens of an environment; None where the model wrote all."""
    reward: float = math.nan
    """Of an environment; NaN without one."""

    @property
    def length(self) -> int:
        """Return the number of tokens that the model wrote."""
        return len(self.tokens) if self.counted is None else int(self.counted.sum())


class Sampler:
    """Writes answers; one serves a whole run, whatever the weights.

    Args:
        engine: of the model.
        stops: tokens that end an answer.
        sampling: of every answer; the seed is the run's.
        rounds: calls to come, which decide whether a program of all layers is worth compiling.
        typical: prompts of a step as long as any, for which memory is planned once, so that no step compiles again.
    """

    def __init__(
        self,
        engine: Engine,
        stops: Collection[int],
        sampling: SamplingConfig,
        *,
        rounds: int,
        typical: Sequence[Sequence[int]],
    ):
        self._engine, self._stops, self._sampling, self._typical = engine, stops, sampling, typical
        self._whole = rounds * sampling.max_tokens >= _MANY_STEPS
        self._plan: CachePlan | None = None

    def __call__(
        self, trainable: Params, frozen: Params, prompts: Sequence[Sequence[int]], indices: Sequence[int], count: int
    ) -> list[list[Sample]]:
        """Return `count` answers to each prompt.

        Args:
            trainable, frozen: parameters, as they are in training.
            prompts: tokens.
            indices: of the prompts in the run, which alone decide on random numbers beside the seed.
            count: answers to each.
        """
        if self._plan is None:
            typical = [Request(prompt, self._sampling, n=count) for prompt in self._typical]
            self._plan = self._engine.plan(typical, limit="--max-completion-length")
            _log.info("sampling: %s", self._plan)
        pairs = zip(prompts, indices, strict=True)
        requests = [Request(prompt, self._sampling, index, n=count) for prompt, index in pairs]
        found: list[dict[int, Sample]] = [{} for _ in prompts]
        for done in self._engine.generate(trainable, frozen, requests, self._stops, plan=self._plan, whole=self._whole):
            found[done.number][done.answer] = Sample(done.tokens, done.log_probs, done.finish == "stop")
        return [[group[index] for index in range(count)] for group in found]

    def turn(
        self,
        trainable: Params,
        frozen: Params,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        turn: int,
        room: Sequence[int],
    ) -> list[Sample]:
        """Return an answer to each prompt in a later turn of its conversation, of at most `room` tokens."""
        seed = self._sampling.seed + turn * _TURN
        requests = [
            Request(prompt, replace(self._sampling, max_tokens=most, seed=seed), index)
            for prompt, index, most in zip(prompts, indices, room, strict=True)
        ]
        options: dict[str, Any] = {"plan": self._plan, "whole": self._whole}
        done = self._engine.generate(trainable, frozen, requests, self._stops, **options)
        found = {one.number: Sample(one.tokens, one.log_probs, one.finish == "stop") for one in done}
        return [found[number] for number in range(len(requests))]
