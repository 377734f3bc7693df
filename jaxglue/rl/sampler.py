"""Answers of the model in training, by the weights that it has now."""

import base64
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxglue.data.images import ImageRules
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.pages import CachePlan, free_bytes
from jaxglue.generation.scheduler import Request
from jaxglue.generation.turns import TurnSource, decode_turns
from jaxglue.models.parameters import Params
from jaxglue.ops.backend import one_device_each
from jaxglue.vision.rows import Image, PromptImages

_log = logging.getLogger(__name__)
_MANY_STEPS = 1024
"""Decode steps of a run from which a program of all layers, which takes longer to compile, pays."""
_LESS, _LEAST = 0.7, 0.3
"""Part of the memory that the next plan of the cache may take, after one with which programs had too little, and the
least part of all to plan with."""

_Trees = tuple[Params, Params]
"""Trainable and frozen parameters."""


class Episode(NamedTuple):
    """What is known of a conversation with an environment, beside its tokens."""

    messages: list[dict[str, Any]]
    """After those of the row's prompt; the first is what the environment added to it, if it did."""
    prompts: list[list[int]]
    """Tokens before each of its rows: one, or one for each turn that is a row of its own."""
    row_ends: list[int]
    """Ends of the rows among its tokens."""
    turn_ends: list[int]
    """Ends of the model's turns among its tokens."""
    turn_rewards: list[float]
    """Of each turn; NaN where the environment gave none."""
    rewards: Mapping[str, float]
    """Of the whole, by names; NaN for none."""
    calls: int = 0
    """Tools that were called."""
    failures: int = 0
    """Calls that failed."""
    died: str | None = None
    """Why it ended before its time."""
    name: str = ""
    """Of the environment's own reward, of which those of turns are parts."""
    images: Sequence[Image] = ()
    """Images that the environment showed."""
    firsts: Sequence[list[int]] = ()
    """First tokens of those of them that each row has; none for no rows."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**self._asdict(), "images": encoded_images(self.images)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], rules: ImageRules | None) -> Self:
        """Return that of `to_json`; raise ValueError for images that cannot be read."""
        return cls(**{**value, "images": decoded_images(value.get("images", ()), rules)})


def encoded_images(images: Sequence[Image]) -> list[str]:
    """Return images that environments showed in base64."""
    encoded = list[str]()
    for image in images:
        assert image.read is not None
        encoded.append(base64.b64encode(image.read()).decode())
    return encoded


def decoded_images(encoded: Sequence[str], rules: ImageRules | None) -> list[Image]:
    """Return those of `encoded_images`, without patches."""
    images = list[Image]()
    for text in encoded:
        assert rules is not None
        images.append(rules.shown(base64.b64decode(text)))
    return images


class Row(NamedTuple):
    """Tokens that training reads after a prompt."""

    prompt: Sequence[int]
    start: int
    end: int
    """Of its tokens among those of the answer."""
    firsts: Sequence[int] = ()
    """First token, of all with the prompt's, of each image that the environment showed before."""


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
    episode: Episode | None = None
    """The conversation with an environment that it is, if there is one."""

    def rows(self, prompt: Sequence[int]) -> Iterator[Row]:
        """Yield the answer's rows: one after the prompt, but for conversations with prompts of their own."""
        if self.episode is None:
            yield Row(prompt, 0, len(self.tokens))
            return
        start = 0
        episode = self.episode
        firsts = episode.firsts or [[]] * len(episode.prompts)
        for before, end, shown in zip(episode.prompts, episode.row_ends, firsts, strict=True):
            yield Row(before, start, end, shown)
            start = end

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


class IdleArrays(Protocol):
    """Arrays of training on the devices that answers do not need while they are sampled."""

    @property
    def bytes(self) -> float:
        """Return their bytes on a device."""

    def pays_moving(self, slots: int, more: int) -> bool:
        """Return whether more answers at a time save more time than it takes to move the arrays out and back."""

    def moved(self) -> AbstractContextManager[None]:
        """Return a context in which they are on the host; after an error in it they stay there."""


def plan_beside(
    plan: Callable[[float], CachePlan], free: float, idle: float, pays: Callable[[int, int], bool]
) -> tuple[CachePlan, bool]:
    """Return the plan of the cache, and whether arrays leave the device for it.

    Args:
        plan: returns that of so many bytes, or raises ValueError where no sequence fits.
        free: bytes beside the arrays.
        idle: bytes of the arrays, perhaps none.
        pays: of `IdleArrays`.
    """
    if not idle:
        return plan(free), False
    roomy = plan(free + idle)
    try:
        usual = plan(free)
    except ValueError:
        return roomy, True
    moves = roomy.slots > usual.slots and pays(usual.slots, roomy.slots)
    return roomy if moves else usual, moves


class Sampler:
    """Writes answers; one serves a whole run, whatever the weights.

    Devices that hold the same weights each answer a part of the prompts.

    Args:
        engine: of the model.
        stops: tokens that end an answer.
        sampling: of every answer; the seed is the run's.
        rounds: calls to come, which decide whether a program of all layers is worth compiling.
        typical: prompts of a step as long as any, for which memory is planned once, so that no step compiles again.
        slots: the most answers at a time; by default as many as memory holds.
        begun: conversations under way at once, whose pages stay where memory holds them.
        reserved: bytes beside the weights that training takes meanwhile.
        idle: arrays that leave the devices meanwhile where that pays; None for none.
    """

    def __init__(
        self,
        engine: Engine,
        stops: Collection[int],
        sampling: SamplingConfig,
        *,
        rounds: int,
        typical: Sequence[Sequence[int]],
        slots: int | None = None,
        begun: int = 0,
        reserved: float = 0,
        idle: IdleArrays | None = None,
    ):
        self._idle, self._moves = idle, False
        self._slots, self._begun, self._reserved = slots, begun, reserved
        self._engine, self._stops, self._sampling, self._typical = engine, stops, sampling, typical
        self._one_program = rounds * sampling.max_tokens >= _MANY_STEPS
        self._plan: CachePlan | None = None
        self._free: float | None = None
        """Bytes beside the weights, as the first plan found them."""
        self._share, self._fits = 1.0, False

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

    def _planned(self, copies: Sequence[_Trees], count: int) -> CachePlan:
        """Return the plan of the cache, which is made once; prompts have so many answers each."""
        if self._plan is None:
            devices = [_device_of(copy) for copy in copies]
            typical = [Request(prompt, self._sampling, n=count) for prompt in self._typical[:: len(devices)]]
            if self._free is None:
                self._free = min(free_bytes(device=device) for device in devices) - self._reserved
            options: dict[str, Any] = {} if self._slots is None else {"slots": -(-self._slots // len(devices))}
            options |= {"begun": -(-self._begun // len(devices)), "limit": "--max-completion-length"}

            def plan(free: float) -> CachePlan:
                return self._engine.plan(typical, memory=self._share * free, **options)

            if self._idle is None:
                self._plan = plan(self._free)
            else:
                self._plan, self._moves = plan_beside(plan, self._free, self._idle.bytes, self._idle.pays_moving)
            _log.info("sampling: %s%s", self._plan, f"; {self._idle} on the host meanwhile" if self._moves else "")
        return self._plan

    def __call__(
        self,
        trainable: Params,
        frozen: Params,
        prompts: Sequence[Sequence[int]],
        images: Sequence[PromptImages | None],
        indices: Sequence[int],
        count: int,
    ) -> list[list[Sample]]:
        """Return `count` answers to each prompt.

        Args:
            trainable, frozen: parameters, as they are in training.
            prompts: tokens.
            images: of each prompt, or None.
            indices: of the prompts in the run, which alone decide on random numbers beside the seed.
            count: answers to each.
        """
        asked = zip(prompts, indices, images, strict=True)
        requests = [Request(prompt, self._sampling, index, n=count, images=seen) for prompt, index, seen in asked]
        trees = trainable, frozen
        return self.in_plan(trees, count, lambda _: self._divided(trees, requests, count))

    def in_plan[T](self, trees: _Trees, count: int, decode: Callable[[CachePlan], T]) -> T:
        """Return what decoding within the plan of the cache gives, of prompts with so many answers each.

        Idle arrays are on the host meanwhile, if the plan needs their memory. The first plan is made again, with less
        memory, while programs have too little beside it.
        """
        while True:
            plan = self._planned(copies_of(trees), count)
            with self._beside_idle():
                try:
                    result = decode(plan)
                except jax.errors.JaxRuntimeError as error:
                    is_last = self._fits or self._share * _LESS < _LEAST
                    if is_last or "RESOURCE_EXHAUSTED" not in (message := str(error)):
                        raise
                else:
                    self._fits = True
                    return result
            self._plan_less(plan, message)

    def _beside_idle(self) -> AbstractContextManager[None]:
        """Return a context in which the plan's memory is free, once nothing in it holds any more."""
        return self._idle.moved() if self._idle is not None and self._moves else nullcontext()

    def _plan_less(self, plan: CachePlan, message: str) -> None:
        """Let the next plan of the cache take less, as its programs asked for more than was left beside this one."""
        self._share, self._plan = self._share * _LESS, None
        first, used = message.splitlines()[0], f"{self._share:.0%}"
        _log.warning("sampling %s ran out of memory: it is planned again with %s of it (%s)", plan, used, first)

    def converse(
        self, trainable: Params, frozen: Params, sources: Callable[[int], Sequence[TurnSource]], count: int
    ) -> None:
        """Decode the turns of conversations until all are over.

        Args:
            trainable, frozen: parameters, as they are in training.
            sources: divides the conversations among so many devices, which hold the same weights.
            count: conversations of a prompt.
        """
        copies = copies_of((trainable, frozen))
        plan = self._planned(copies, count)

        def decode(trees: _Trees, source: TurnSource) -> None:
            with one_device_each() if len(copies) > 1 else nullcontext():
                decode_turns(self._engine, trees, source, plan, self._sampling, self._stops, whole=self._one_program)

        with self._beside_idle():
            if len(copies) == 1:
                decode(copies[0], sources(1)[0])
                return
            with ThreadPoolExecutor(len(copies), "sampling") as pool:
                list(pool.map(decode, copies, sources(len(copies))))
