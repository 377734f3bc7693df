"""Answers of the model in training, by the weights that it has now."""

import logging
import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.pages import CachePlan, free_bytes
from jaxglue.generation.scheduler import Request
from jaxglue.models.parameters import Params
from jaxglue.ops.backend import one_device_each

_log = logging.getLogger(__name__)
_MANY_STEPS = 1024
"""Decode steps of a run from which a program of all layers, which takes longer to compile, pays."""

_Trees = tuple[Params, Params]
"""Trainable and frozen parameters."""

_TURN = 1_000_003
"""Separates the seeds of turns."""


class Sample(NamedTuple):
    """An answer."""

    tokens: Int[np.ndarray, " L"]
    """Tokens, with the one that ended it."""
    log_probs: Float[np.ndarray, " L"]
    """Log-probabilities of the tokens, at the temperature of sampling."""
    ended: bool
    """False for one that reached its longest length."""
    text: str = ""
    """Without special tokens."""
    old: Float[np.ndarray, " L"] | None = None
    """Log-probabilities by training's programs, where several steps are made on the answer."""
    reference: Float[np.ndarray, " L"] | None = None
    """Log-probabilities under the reference, where the objective has one."""
    counted: Bool[np.ndarray, " L"] | None = None
    """False for tokens of an environment; None where the model wrote all."""
    reward: float = math.nan
    """Reward by an environment; NaN without one."""
    messages: list[dict[str, Any]] | None = None
    """Messages of a conversation with an environment, after those of the prompt."""

    @property
    def length(self) -> int:
        """Return the number of tokens that the model wrote."""
        return len(self.tokens) if self.counted is None else int(self.counted.sum())

    @property
    def divergence(self) -> float:
        """Return Σ log π − log π_ref over the tokens, in nats; 0 where one of both is not known."""
        if self.old is None or self.reference is None:
            return 0.0
        return float(np.sum(self.old - self.reference, dtype=np.float64))


def copies_of(trees: _Trees) -> list[_Trees]:
    """Return the trees on each of their devices where every one holds all values, without copying; else as they are."""
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    devices = sorted(arrays[0].sharding.device_set, key=attrgetter("id")) if arrays else []
    replicated = all(array.is_fully_replicated and array.is_fully_addressable for array in arrays)
    if len(devices) < 2 or not replicated:
        return [trees]

    def on(device: jax.Device, value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return value
        return next(shard.data for shard in value.addressable_shards if shard.device == device)

    return [jax.tree.map(partial(on, device), trees) for device in devices]


def _device_of(trees: _Trees) -> jax.Device | None:
    """Return the first device of the trees."""
    first = next((leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)), None)
    return None if first is None else next(iter(first.devices()))


class Sampler:
    """Writes answers; one serves a whole run, whatever the weights.

    Devices that hold the same weights each answer a part of the prompts.

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
        self._one_program = rounds * sampling.max_tokens >= _MANY_STEPS
        self._plan: CachePlan | None = None

    def _answer(self, trees: _Trees, requests: Sequence[Request], count: int) -> list[list[Sample]]:
        """Return the answers to each request."""
        answers: list[dict[int, Sample]] = [{} for _ in requests]
        for done in self._engine.generate(*trees, requests, self._stops, plan=self._plan, whole=self._one_program):
            answers[done.number][done.answer] = Sample(done.tokens, done.log_probs, done.finish == "stop")
        return [[group[index] for index in range(count)] for group in answers]

    def _divided(self, trees: _Trees, requests: Sequence[Request], count: int) -> list[list[Sample]]:
        """Return the answers to each request, of which devices with the same weights take every second, third, …"""
        copies = copies_of(trees)
        parts = [requests[first :: len(copies)] for first in range(len(copies))]
        if len(copies) == 1:
            return self._answer(trees, requests, count)

        def answer(copy: _Trees, part: Sequence[Request]) -> list[list[Sample]]:
            with one_device_each():
                return self._answer(copy, part, count)

        with ThreadPoolExecutor(len(copies), "sampling") as pool:
            answered = list(pool.map(answer, copies, parts))
        return [answered[index % len(copies)][index // len(copies)] for index in range(len(requests))]

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
            devices = [_device_of(copy) for copy in copies_of((trainable, frozen))]
            typical = [Request(prompt, self._sampling, n=count) for prompt in self._typical[:: len(devices)]]
            free = min(free_bytes(device=device) for device in devices)
            self._plan = self._engine.plan(typical, limit="--max-completion-length", memory=free)
            _log.info("sampling: %s", self._plan)
        pairs = zip(prompts, indices, strict=True)
        requests = [Request(prompt, self._sampling, index, n=count) for prompt, index in pairs]
        return self._divided((trainable, frozen), requests, count)

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
        return [answer for (answer,) in self._divided((trainable, frozen), requests, 1)]
