"""Answers of the model in training, by the weights that it has now."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.generator import Generator, Request
from jaxglue.models.parameters import Params


class Sample(NamedTuple):
    """An answer."""

    tokens: Int[np.ndarray, " L"]
    """With the token that ended it."""
    log_probs: Float[np.ndarray, " L"]
    """Of the tokens, at the temperature of sampling; NaN where unknown."""
    ended: bool
    """False for one that reached its longest length."""
    text: str = ""
    """Without special tokens."""
    old: Float[np.ndarray, " L"] | None = None
    """Log-probabilities by training's programs, where several steps are made on the answer."""
    reference: Float[np.ndarray, " L"] | None = None
    """Those of the reference, where the objective has one."""


class Sampler:
    """Writes answers; one serves a whole run, whatever the weights.

    Args:
        generator: of the model.
        stops: tokens that end an answer.
        sampling: of every answer; the seed is the run's.
    """

    def __init__(self, generator: Generator, stops: Collection[int], sampling: SamplingConfig):
        self._generator, self._stops, self._sampling = generator, stops, sampling

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
        requests = [
            Request(prompt, self._sampling, index * count + answer)
            for prompt, index in zip(prompts, indices, strict=True)
            for answer in range(count)
        ]
        found: list[list[Sample]] = [[] for _ in prompts]
        answers = dict(self._generator.answers(trainable, frozen, requests, self._stops))
        for number in range(len(requests)):
            tokens, ended = answers[number], len(answers[number]) < self._sampling.max_tokens
            whole = np.array([*tokens, *sorted(self._stops)[:1]] if ended else tokens, np.int32)
            found[number // count].append(Sample(whole, np.full(len(whole), np.nan, np.float32), ended))
        return found
