"""The engine of generation: many answers decoded together, in windows of steps that the device runs without the host.

While a window runs, the host receives the results of the one before, refills the slots that became free, and dispatches
the next. So an answer that ends at a token is noticed one window late, and one that ends at its limit at once.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.contexts import Places
from jaxglue.generation.pages import PAGE, CachePlan, make_caches, plan_cache, ring_table
from jaxglue.generation.programs import IDLE, NOT_FINITE, Copies, Programs, Trees, Window, make_sequences
from jaxglue.generation.sampling import Controls, Features, Sampled, answer_keys
from jaxglue.generation.scheduler import Answer, Finish, Prompt, Request, Scheduler, Tokens, Work
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.ops.segments import pack_segments, segment_bucket

STEPS = 8
"""Tokens of a window: ended answers idle for half of it, and one window more if a stop token ended them."""
_SMALLEST_ROW = 128
_MANY_STEPS = 1024
"""Decode steps from which a program of all layers, whose compile time grows with depth, is worth compiling."""
_PADDED = 8
"""Lists of stop tokens and biases are padded to multiples of this, so that few programs are compiled."""


@dataclass(frozen=True)
class Completion:
    """An answer that ended, L tokens."""

    number: int
    """Index of its request."""
    answer: int
    """Index among the answers of its request."""
    tokens: Int[np.ndarray, " L"]
    """With the stop token that ended it, if one did."""
    log_probs: Float[np.ndarray, " L"]
    """At the temperature, with penalties and biases, before top-k, top-p and min-p; at temperature 0 as at 1."""
    model_log_probs: Float[np.ndarray, " L"]
    """Of the model alone, at temperature 1."""
    top: tuple[Int[np.ndarray, "L top"], Float[np.ndarray, "L top"]] | None
    """The most likely tokens and their log-probabilities in the model, if `top_log_probs` asks for any."""
    finish: Finish


class Piece(NamedTuple):
    """New tokens of an answer."""

    number: int
    """Index of its request."""
    answer: int
    """Index among the answers of its request."""
    tokens: list[int]
    """With the stop token that ended it, if one did."""
    finish: Finish | None
    """Why it ended; None while it grows."""


Until = Callable[[int, int, list[int]], bool]
"""`until(number, answer, tokens so far)` ends an answer, which may hold tokens after the decisive one."""


class Engine:
    """Token generation for a model split by `split_model`; holds compiled programs, no weights.

    Args:
        graphdefs: the modules.
        config: the model's shape.
        dtype: the dtype of activations, matmuls and cache.
        attention: the attention backend for prompts.
    """

    def __init__(
        self, graphdefs: ModelGraphDefs, config: DecoderConfig, *, dtype=jnp.bfloat16, attention: str = "auto"
    ):
        self.config, self._dtype = config, dtype
        self._programs = Programs(graphdefs, config, dtype, attention)
        self._compiled = set[Any]()
        self.compilations = self._programs.compilations

    def generate(
        self,
        trainable: Params,
        frozen: Params,
        requests: Sequence[Request],
        stop: Collection[int] = (),
        *,
        memory: float | None = None,
        slots: int | None = None,
        plan: CachePlan | None = None,
        until: Until | None = None,
        whole: bool | None = None,
    ) -> Iterator[Completion]:
        """Yield every answer as it ends.

        Random numbers depend on the seed, the request's and the answer's index and a token's position alone.

        Args:
            trainable, frozen: the parameters, which the programs read where they are.
            requests: prompts with their sampling.
            stop: tokens that end every answer.
            memory: bytes for cache and activations; by default nearly all that are free.
            slots: the most answers at a time; by default as many as memory holds.
            plan: of the cache, in place of `memory` and `slots`; by default `plan`'s.
            until: ends answers early.
            whole: compile all layers and steps of a window into one program; by default for many steps. Weights on
                several devices always run layer by layer.

        Raises:
            ValueError: before the first answer, an empty prompt, one reaching the model's limit, a token outside its
                vocabulary, or too little memory; or logits that are not finite.
        """
        for answer, _, finish in self._run(trainable, frozen, requests, stop, memory, slots, plan, until, whole):
            if finish:
                yield _completion(answer, finish)

    def pieces(
        self,
        trainable: Params,
        frozen: Params,
        requests: Sequence[Request],
        stop: Collection[int] = (),
        *,
        memory: float | None = None,
        slots: int | None = None,
        plan: CachePlan | None = None,
        until: Until | None = None,
        whole: bool | None = None,
    ) -> Iterator[Piece]:
        """Yield the answers while they grow; arguments and errors as of `generate`."""
        for answer, tokens, finish in self._run(trainable, frozen, requests, stop, memory, slots, plan, until, whole):
            yield Piece(answer.number, answer.answer, tokens.tolist(), finish)

    def stream(
        self,
        trainable: Params,
        frozen: Params,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        stop: Collection[int] = (),
        *,
        index: int = 0,
    ) -> Iterator[int]:
        """Yield the tokens of one answer up to a stop token (excluded); errors as of `generate`."""
        for piece in self.pieces(trainable, frozen, [Request(prompt, sampling, index)], stop):
            yield from (token for token in piece.tokens if token not in stop)

    def plan(self, requests: Sequence[Request], *, memory: float | None = None, slots: int | None = None) -> CachePlan:
        """Plan the cache for requests; arguments and errors as of `generate`."""
        lengths = [(len(r.prompt), self._end(r, number)) for number, r in enumerate(requests, 1) for _ in range(r.n)]
        return plan_cache(lengths, self.config, self._dtype, batch_size=slots, free=memory)

    def _run(self, trainable, frozen, requests, stop, memory, slots, plan, until, whole):
        """Yield (answer, new tokens, reason if it ended)."""
        if not requests:
            return
        trees, plan = (trainable, frozen), plan or self.plan(requests, memory=memory, slots=slots)
        answers = [
            Answer(number, index, request, self._end(request, number + 1))
            for number, request in enumerate(requests)
            for index in range(request.n)
        ]
        if whole is None:
            whole = sum(answer.end - answer.length for answer in answers) >= _MANY_STEPS * plan.slots
        whole = whole and sharding_of(trees) is None
        batch = _Batch(self._programs, self._compiled, trees, answers, plan, stop, self.config, self._dtype, whole)
        for answer, tokens, finish in batch.run():
            if not finish and until and until(answer.number, answer.answer, answer.new):
                batch.scheduler.end(answer)
                finish = "until"
            yield answer, tokens, finish

    def _end(self, request: Request, number: int) -> int:
        """Return the limit of prompt and answer together, after checking the prompt."""
        limit, vocabulary, count = self.config.max_generated_positions, self.config.vocab_size, len(request.prompt)
        if not 0 < count < limit:
            raise ValueError(f"prompt {number} has {count:,} tokens: expected 1 to {limit - 1:,}, the model's limit")
        require_known(request.prompt, vocabulary, f"prompt {number}")
        return min(count + request.sampling.max_tokens, limit)


def require_known(tokens: Sequence[int] | np.ndarray, vocabulary: int, name: str) -> None:
    """Raise ValueError for a token outside the vocabulary, whose embedding would be NaN or another token's."""
    if wrong := next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None):
        raise ValueError(f"{name} holds token id {wrong}, but the model's vocabulary has {vocabulary}")


def sharding_of(trees: Trees) -> jax.sharding.Sharding | None:
    """Return the sharding of a value that all devices of the weights hold; None for a single device."""
    sharding = next((leaf.sharding for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)), None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.device_set) == 1:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())


def _completion(answer: Answer, finish: Finish) -> Completion:
    columns = zip(*answer.received, strict=True)
    ids, log_probs, model_log_probs, top_ids, top = map(np.concatenate, columns)
    wanted = answer.request.top_log_probs
    most_likely = (top_ids[:, :wanted], top[:, :wanted]) if wanted else None
    return Completion(answer.number, answer.answer, ids, log_probs, model_log_probs, most_likely, finish)


class _Batch:
    """Answers of one call, with the state of the device."""

    def __init__(self, programs: Programs, compiled, trees: Trees, answers, plan, stop, config, dtype, whole: bool):
        self._programs, self._compiled, self._trees, self._plan, self._whole = programs, compiled, trees, plan, whole
        self._requests = _Requests(answers, stop, config.vocab_size)
        place = sharding_of(trees)
        self._caches = make_caches(plan, config, dtype, place)
        self._slots = make_sequences(plan, config.vocab_size, self._requests.features, place)
        self.scheduler = Scheduler(answers, plan, STEPS)

    def run(self) -> Iterator[tuple[Answer, Int[np.ndarray, " n"], Finish | None]]:
        """Yield answers with their new tokens, and why they ended."""
        under_way = deque[tuple[Work, Any]]()
        while not self.scheduler.is_done or under_way:
            work = None if self.scheduler.is_done else self.scheduler.next()
            if work:
                under_way.append((work, self._dispatch(work)))
            if under_way and (not work or len(under_way) > 1):
                yield from self._receive(*under_way.popleft())

    def _dispatch(self, work: Work) -> Sampled:
        """Start the prefill and the window; return its results to come."""
        for row in work.rows:
            self._prefill(row)
        self._copy_pages(work)
        if self._slots.counts is not None and work.fresh:
            self._count(work.fresh)
        steps_left = max(answer.end - answer.reach for answer in work.answers)
        window = self._requests.window(work, self._plan, self._size(len(work.answers), steps_left))
        self._slots, self._caches, sampled = self._programs.window(
            self._trees,
            self._slots,
            self._caches,
            window,
            plan=self._plan,
            steps=STEPS,
            features=self._requests.features,
            whole=self._whole,
        )
        jax.tree.map(lambda x: x.copy_to_host_async(), sampled)
        return sampled

    def _size(self, count: int, steps_left: int) -> int:
        """Return the sequences of a window with `count` answers: the slots, or a half, quarter, … of these.

        A program for fewer is compiled only if many steps are left.
        """
        kind = self._plan, self._requests.features, self._requests.stops, self._whole
        smallest = self._plan.slots
        while smallest // 2 >= count:
            smallest //= 2
        ready = [size for size in range(smallest, self._plan.slots + 1) if (*kind, size) in self._compiled]
        if not ready or (ready[0] > smallest and steps_left >= (_MANY_STEPS if self._whole else _MANY_STEPS // 8)):
            ready = [smallest if ready else self._plan.slots]
            self._compiled.add((*kind, ready[0]))
        return ready[0]

    def _prefill(self, row: Sequence[Prompt]) -> None:
        """Run prompts in one packed row."""
        lengths = [len(prompt.tokens) for prompt in row]
        used = sum(lengths)
        T = max(_SMALLEST_ROW, 1 << (used - 1).bit_length())
        tokens: Any = np.zeros((1, T), np.int32)
        tokens[0, :used] = np.concatenate([prompt.tokens for prompt in row])
        segments = pack_segments([lengths], seq_len=T, max_segments=max(segment_bucket(len(row)), 16))
        pages: Any = tuple(np.zeros(T, np.int32) for _ in self._programs.windows)
        for kind, window in zip(pages, self._programs.windows, strict=True):
            kind[:used] = np.concatenate([self._places(prompt, window) for prompt in row])
        offsets: Any = segments.positions[0] % PAGE
        places: Any = Places(pages=pages, offsets=offsets, windows=self._programs.windows)
        self._caches = self._programs.prefill(self._trees, tokens, segments, places, self._caches)

    def _places(self, prompt: Prompt, window: int | None) -> Int[np.ndarray, " n"]:
        """Return the page of each token of a prompt; 0 for those that a layer with this window has no more."""
        page = np.arange(len(prompt.tokens)) // PAGE
        if window is None:
            return np.array(prompt.pages, np.int32)[page]
        ring = self._plan.ring(window)
        table: Any = ring_table(np.array([prompt.slot]), ring, self._plan.table)  # type: ignore[arg-type]
        return np.where(page > page[-1] - ring, table[0, page], 0)

    def _copy_pages(self, work: Work) -> None:
        """Copy the pages of prompts that answers of their own continue, for each kind of layers."""
        if not work.slot_copies:
            return
        copies = []
        for window in self._programs.windows:
            pairs = np.array(work.page_copies, np.int32).reshape(-1, 2)
            if window is not None:
                slots: Any = np.array(work.slot_copies)
                ring = self._plan.ring(window)
                pairs = np.stack([ring_table(slots[:, i], ring, ring).ravel() for i in range(2)], axis=1)
            copies.append(np.pad(pairs, ((0, _power_of_two(len(pairs)) - len(pairs)), (0, 0))).astype(np.int32))
        sources, targets = (tuple(pairs[:, i] for pairs in copies) for i in range(2))
        self._caches = self._programs.copy(self._caches, Copies(sources, targets))  # type: ignore[arg-type]

    def _count(self, fresh: Sequence[Answer]) -> None:
        """Count the tokens of answers that begin."""
        count, length = _power_of_two(len(fresh)), _power_of_two(max(answer.length for answer in fresh))
        slots: Any = np.full(count, self._plan.slots, np.int32)
        tokens: Any = np.full((count, length), -1, np.int32)
        new: Any = np.zeros((count, length), bool)
        for i, answer in enumerate(fresh):
            slots[i], tokens[i, : answer.length] = answer.slot, answer.tokens
            new[i, len(answer.request.prompt) :] = True
        counts = self._programs.note(self._slots.counts, slots, tokens, new)  # type: ignore[arg-type]
        self._slots = replace(self._slots, counts=counts)

    def _receive(self, work: Work, sampled: Any) -> Iterator[tuple[Answer, Int[np.ndarray, " n"], Finish | None]]:
        """Yield the new tokens of a window's answers.

        Raises:
            ValueError: logits that are infinite or NaN.
        """
        steps: Any = jax.device_get(sampled)
        if isinstance(steps, list):
            steps = Sampled(*map(np.stack, zip(*steps, strict=True)))  # type: ignore[arg-type]
        if (steps.tokens == NOT_FINITE).any():
            raise ValueError("the model's logits are not finite (NaN or infinity): check its weights and the adapter")
        for column, answer in enumerate(work.answers):
            answer.windows -= 1
            ids = steps.tokens[:, column]
            count = int((ids != IDLE).sum())
            if not count or answer.length >= answer.end:
                continue  # it ended in the last window, or the caller ended it
            parts = steps.log_probs, steps.model_log_probs, steps.top_tokens, steps.top_log_probs
            tokens = Tokens(ids[:count], *(part[:count, column] for part in parts))
            stopped = int(ids[count - 1]) in self._requests.stop_tokens(answer)
            self.scheduler.receive(answer, tokens, stopped)
            ended = "stop" if stopped else "length" if answer.length >= answer.end else None
            yield answer, tokens.ids, ended  # type: ignore[misc]


class _Requests:
    """Numbers of the answers' requests, as the device reads them."""

    def __init__(self, answers: Sequence[Answer], stop: Collection[int], vocabulary: int):
        self._stop, self._vocabulary = frozenset(stop), vocabulary
        requests = list({id(answer.request): answer.request for answer in answers}.values())
        sampled = [r.sampling for r in requests if r.sampling.temperature > 0]
        self.features = Features(
            draws=bool(sampled),
            top_k=any(s.top_k for s in sampled),
            top_p=any(s.top_p < 1 for s in sampled),
            min_p=any(s.min_p for s in sampled),
            penalties=any(r.sampling.has_penalties for r in requests),
            biases=any(r.logit_bias for r in requests),
            top=max(r.top_log_probs for r in requests),
        )
        self.stops = _padded(max(len(self._stop | set(r.stop)) for r in requests))
        self._biases = _padded(max(len(r.logit_bias) for r in requests))
        keys = answer_keys([(a.request.sampling.seed, a.request.index, a.answer) for a in answers])
        self._keys = dict(zip(map(id, answers), keys, strict=True))

    def stop_tokens(self, answer: Answer) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return self._stop.union(answer.request.stop)

    def window(self, work: Work, plan: CachePlan, size: int) -> Window:
        """Return the window of the work's answers, padded to `size` sequences, in numpy."""
        fields: dict[str, Any] = {
            "slots": np.full(size, plan.slots, np.int32),
            "fresh": np.zeros(size, bool),
            "tokens": np.zeros(size, np.int32),
            "positions": np.zeros(size, np.int32),
            "ends": np.zeros(size, np.int32),
            "tables": np.zeros((size, plan.table), np.int32),
            "stops": np.full((size, self.stops), -1, np.int32),
        }
        fresh = set(map(id, work.fresh))
        for i, answer in enumerate(work.answers):
            fields["slots"][i], fields["ends"][i] = answer.slot, answer.end
            fields["tables"][i, : len(answer.pages)] = answer.pages
            stops = sorted(self.stop_tokens(answer))
            fields["stops"][i, : len(stops)] = stops
            if id(answer) in fresh:
                last = answer.received[-1].ids[-1] if answer.received else answer.request.prompt[-1]
                fields["fresh"][i], fields["tokens"][i], fields["positions"][i] = True, last, answer.length - 1
        return Window(**fields, controls=self._controls(work.answers, size))

    def _controls(self, answers: Sequence[Answer], size: int) -> Controls:
        settings = [answer.request.sampling for answer in answers]

        def column(name: str, kind: type, idle: float) -> Any:
            return np.array([getattr(s, name) for s in settings] + [idle] * (size - len(settings)), kind)

        keys: Any = np.zeros((size, *next(iter(self._keys.values())).shape), np.uint32)
        bias_tokens: Any = np.full((size, self._biases), self._vocabulary, np.int32)
        biases: Any = np.zeros((size, self._biases), np.float32)
        for i, answer in enumerate(answers):
            keys[i] = self._keys[id(answer)]
            if bias := answer.request.logit_bias:
                bias_tokens[i, : len(bias)], biases[i, : len(bias)] = list(bias), list(bias.values())
        return Controls(
            keys=keys,
            temperature=column("temperature", np.float32, 0.0),
            top_k=column("top_k", np.int32, 0),
            top_p=column("top_p", np.float32, 1.0),
            min_p=column("min_p", np.float32, 0.0),
            repetition=column("repetition_penalty", np.float32, 1.0),
            presence=column("presence_penalty", np.float32, 0.0),
            frequency=column("frequency_penalty", np.float32, 0.0),
            bias_tokens=bias_tokens,
            biases=biases,
        )


def _padded(count: int) -> int:
    return -(-max(count, 1) // _PADDED) * _PADDED


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
