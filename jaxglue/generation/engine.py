"""The engine of generation: many answers decoded together, in windows of steps that the device runs without the host.

While a window runs, the host receives the results of the one before, refills the slots that became free, and dispatches
the next. So an answer that ends at a token is noticed one window late, and one that ends at its limit at once.
"""

import atexit
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxglue.engine.compiler import rounding_as_written
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.contexts import Cursor, Places
from jaxglue.generation.grammar import Grammar
from jaxglue.generation.pages import PAGE, PREFILL_TOKENS, CachePlan, free_bytes, make_caches, plan_cache, ring_table
from jaxglue.generation.programs import IDLE, NOT_FINITE, Cache, Copies, Programs, Trees, Window, make_sequences
from jaxglue.generation.sampling import Controls, Features, Sampled, answer_keys
from jaxglue.generation.scheduler import (
    LONGEST_SUFFIX,
    Answer,
    Finish,
    Prefill,
    Request,
    Scheduler,
    Tokens,
    Work,
)
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.ops.choices import KVCache
from jaxglue.ops.segments import pack_segments, segment_bucket

_log = logging.getLogger(__name__)
STEPS = 8
"""Tokens of a window: ended answers idle for half of it, and one window more if a stop token ended them."""
_SMALLEST_ROW, _SHORT_SUFFIX, _SMALLEST_TEXT = 128, 64, 1024
_MANY_STEPS = 1024
"""Decode steps from which a program of all layers, whose compile time grows with depth, is worth compiling."""
_SMALLEST_SIZE, _FLAT = 8, 256
"""Sequences below which a window takes hardly less time, and up to which reading the weights decides it."""
_HALVES = 3
"""Smaller windows that are compiled: each for half as many slots as the one before."""
_COMPILERS, _KINDS = 3, 8
"""Threads that compile, and kinds of windows whose programs are kept."""
_REUSED = 0.7
"""Share of the memory, and of an earlier plan, up to and from which that plan serves again."""
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
    """Tokens, with the stop token that ended it, if one did."""
    log_probs: Float[np.ndarray, " L"]
    """Log-probabilities at the temperature, with penalties and biases, before top-k, top-p and min-p; 0 counts as 1."""
    model_log_probs: Float[np.ndarray, " L"]
    """Log-probabilities by the model alone, at temperature 1."""
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
    """Tokens, with the stop token that ended it, if one did."""
    finish: Finish | None
    """Why it ended; None while it grows."""


Until = Callable[[int, int, list[int]], bool]
"""`until(number, answer, tokens so far)` ends an answer, which may hold tokens after the decisive one."""


class Engine:
    """Token generation for a model split by `split_model`; holds compiled programs, no weights.

    Args:
        graphdefs: the modules.
        config: the model's shape.
        dtype: the dtype of activations, matmuls and, by default, the cache.
        attention: the attention backend for prompts.
        kv_cache: format of keys and values.
        ahead: let a thread compile windows as one program also while few steps run layer by layer: for a process that
            stays. Its end waits for the thread.
        as_written: round values wherever the code does, as training does whose log-probabilities are compared; see
            `rounding_as_written`.
    """

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        *,
        dtype=jnp.bfloat16,
        attention: str = "auto",
        kv_cache: KVCache = "auto",
        ahead: bool = False,
        as_written: bool = False,
    ):
        self._as_written = as_written
        self.config, self._dtype, self._ahead = config, dtype, ahead
        self.cache_dtype = jnp.float8_e4m3fn if kv_cache == "fp8" else dtype
        self._model = graphdefs, config, dtype, attention
        self._fp8_layers = [True] * len(graphdefs.layers)
        self._programs = self._make_programs()
        self._sizes = dict[Any, _Sizes]()
        self._compiler = ThreadPoolExecutor(_COMPILERS, "windows")
        self._plan: CachePlan | None = None
        self.compilations = self._programs.compilations

    def multiply_in_fp8(self, layers: Sequence[bool]) -> None:
        """Multiply matrices for FP8 products so in these layers alone, as training does; at first all do."""
        if list(layers) != self._fp8_layers:
            self._fp8_layers = list(layers)
            self._programs = self._make_programs()
            self.compilations = self._programs.compilations
            self._sizes.clear()

    def _make_programs(self) -> Programs:
        with rounding_as_written(self._as_written):
            return Programs(*self._model, self._fp8_layers)

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
        grammar: Grammar | None = None,
        memory: float | None = None,
    ) -> Iterator[int]:
        """Yield the tokens of one answer up to a stop token (excluded); errors as of `generate`."""
        request = Request(prompt, sampling, index, grammar=grammar)
        plan = self._plan_roomy(request, memory)
        for piece in self.pieces(trainable, frozen, [request], stop, plan=plan):
            yield from (token for token in piece.tokens if token not in stop)

    def plan(
        self,
        requests: Sequence[Request],
        *,
        memory: float | None = None,
        slots: int | None = None,
        limit: str = "--max-tokens",
    ) -> CachePlan:
        """Plan the cache for requests; `limit` as of `plan_cache`, other arguments and errors as of `generate`."""
        lengths = [(len(r.prompt), self._end(r, number)) for number, r in enumerate(requests, 1) for _ in range(r.n)]
        options: dict[str, Any] = {"cache_dtype": self.cache_dtype, "batch_size": slots, "free": memory, "limit": limit}
        siblings = [request.n for request in requests for _ in range(request.n)]
        return plan_cache(lengths, self.config, self._dtype, **options, siblings=siblings)

    def _plan_roomy(self, request: Request, memory: float | None) -> CachePlan:
        """Plan the cache for an answer and longer ones, which then need no other programs, if there is memory."""
        end = self._end(request, 1)
        roomy = max(_SMALLEST_TEXT, 1 << (end - 1).bit_length())
        if roomy <= self.config.max_generated_positions:
            with suppress(ValueError):
                options: dict[str, Any] = {"cache_dtype": self.cache_dtype, "batch_size": 1, "free": memory}
                return plan_cache([(len(request.prompt), roomy)], self.config, self._dtype, **options)
        return self.plan([request], memory=memory)

    def wait(self) -> None:
        """Wait for programs that are compiled beside the answers, as measurements do."""
        for sizes in self._sizes.values():
            sizes.wait()

    def _run(self, trainable, frozen, requests, stop, memory, slots, plan, until, whole):
        """Yield (answer, new tokens, reason if it ended)."""
        if not requests:
            return
        plan = plan or self._earlier(self.plan(requests, memory=memory, slots=slots), memory)
        answers = [answer for number, request in enumerate(requests) for answer in self.answers(request, number)]
        if whole is None:
            whole = sum(answer.end - answer.length for answer in answers) >= _MANY_STEPS * plan.slots
        batch = self.open(trainable, frozen, plan, Kind.of(requests, stop), whole=whole)
        batch.add(answers, stop)
        try:
            while batch.is_busy:
                for answer, tokens, finish in batch.advance():
                    if not finish and until and until(answer.number, answer.answer, answer.new):
                        batch.end(answer)
                        finish = "until"
                    yield answer, tokens, finish
        finally:
            batch.close()

    def answers(self, request: Request, number: int) -> list[Answer]:
        """Return the answers of a request, numbered, that a batch takes; errors as of `generate`."""
        end = self._end(request, number + 1)
        return [Answer(number, index, request, end) for index in range(request.n)]

    def open(self, trainable: Params, frozen: Params, plan: CachePlan, kind: "Kind", *, whole: bool) -> "Batch":
        """Return a batch without answers; `kind` has all that they use, other arguments are as of `generate`."""
        trees = trainable, frozen
        whole = whole and sharding_of(trees) is None
        leaves = tuple((x.shape, str(x.dtype), _placed(x)) for x in jax.tree.leaves(trees))
        name = plan, kind, whole, leaves
        if name not in self._sizes and len(self._sizes) >= _KINDS:
            del self._sizes[next(iter(self._sizes))]
        sizes = self._sizes.setdefault(name, _Sizes(plan.slots))
        compiler = self._compiler if whole or (self._ahead and sharding_of(trees) is None) else None
        caches = make_caches(plan, self.config, self.cache_dtype, self._dtype, place_of(trees))
        return Batch(self._programs, trees, caches, plan, kind, sizes, compiler, self.config.vocab_size, whole=whole)

    def _earlier(self, plan: CachePlan, memory: float | None) -> CachePlan:
        """Return the last call's plan where it serves this one's, since others need programs of their own."""
        old, free = self._plan, free_bytes() if memory is None else memory
        serves = old is not None and old.slots == plan.slots and old.table >= plan.table and old.pages >= plan.pages
        if old is None or not serves or old.bytes > _REUSED * free or plan.bytes < _REUSED * old.bytes:
            self._plan = plan
        return self._plan or plan

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


def place_of(trees: Trees) -> jax.sharding.Sharding | None:
    """Return where state beside the weights belongs: on all their devices, the one they are bound to, or anywhere."""
    first = next((leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)), None)
    if (sharding := sharding_of(trees)) is not None or first is None or not first.committed:
        return sharding
    return jax.sharding.SingleDeviceSharding(next(iter(first.sharding.device_set)))


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


class _Sizes:
    """Numbers of sequences for which windows of one kind are compiled: the slots, and fewer.

    The last of many answers are decoded by smaller programs, which threads compile meanwhile.
    """

    def __init__(self, slots: int):
        self._slots, self._ready = slots, dict[int, Any]()
        self._asked, self._under_way = False, list[Future]()

    def take(self, count: int, whole: bool) -> tuple[int, Any]:
        """Return the smallest size for `count` answers that is compiled, and its program.

        Without any, return None as the program, and all slots if those of a window are `whole`; windows by layers,
        which compile fast, are for a fourth of the slots, of that, …
        """
        if ready := [size for size in list(self._ready) if size >= count]:
            return min(ready), self._ready[min(ready)]
        size = self._slots
        while not whole and size // 4 >= count:
            size //= 4
        return size, None

    def put(self, run: Any) -> None:
        """Add the program for all slots."""
        self._ready.setdefault(self._slots, run)

    def compile(self, compiler: ThreadPoolExecutor, compile_size: Callable[[int], Any]) -> None:
        """Let threads compile the sizes that are missing, once."""
        if self._asked:
            return
        sizes = _fewer(self._slots) if self._slots in self._ready else [self._slots]
        self._under_way = [compiler.submit(copy_context().run, self._compile, compile_size, size) for size in sizes]
        self._asked = True

    def wait(self) -> None:
        """Wait for the threads."""
        wait(self._under_way)

    def give_up(self) -> None:
        """Leave out the sizes whose compilation has not begun; the next call asks for them again."""
        cancelled = [future.cancel() for future in self._under_way]
        self._asked = self._asked and not any(cancelled)

    def _compile(self, compile_size: Callable[[int], Any], size: int) -> None:
        if size not in self._ready:
            try:
                with _switching_often():
                    self._ready[size] = compile_size(size)
            except Exception as error:  # larger programs serve, too
                _log.warning("a program for %d answers was not compiled: %s", size, error)


class Kind(NamedTuple):
    """Features that the answers of a batch use, for which programs are compiled."""

    features: Features
    stops: int
    """Stop tokens of an answer, at most."""
    biases: int
    """Tokens of an answer that have a bias, at most."""
    ranks: int = 0
    """Ranks of the adapters, of which answers use some; 0 where all use all."""

    @classmethod
    def of(cls, requests: Sequence[Request], stop: Collection[int]) -> "Kind":
        """Return the kind of these requests."""
        sampled = [request.sampling for request in requests if request.sampling.temperature > 0]
        features = Features(
            draws=bool(sampled),
            top_k=any(sampling.top_k for sampling in sampled),
            top_p=any(sampling.top_p < 1 for sampling in sampled),
            min_p=any(sampling.min_p for sampling in sampled),
            penalties=any(request.sampling.has_penalties for request in requests),
            biases=any(request.logit_bias for request in requests),
            grammars=any(request.grammar for request in requests),
            top=max(request.top_log_probs for request in requests),
        )
        stops = max(len(set(stop).union(request.stop)) for request in requests)
        biases = max(len(request.logit_bias) for request in requests)
        ranks = max(0 if request.ranks is None else len(request.ranks) for request in requests)
        return cls(features, _padded(stops), _padded(biases), ranks)


_OPEN: "weakref.WeakSet[Batch]" = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Wait for windows under way, as of answers to a closed pipe: XLA aborts a process that ends before them."""
    for batch in list(_OPEN):
        with suppress(Exception):
            batch.close()


class Batch:
    """Answers in progress, with the state of the device; made by `Engine.open`."""

    def __init__(
        self,
        programs: Programs,
        trees: Trees,
        caches: list[Cache],
        plan: CachePlan,
        kind: Kind,
        sizes: _Sizes,
        compiler: ThreadPoolExecutor | None,
        vocabulary: int,
        *,
        whole: bool,
    ):
        self._programs, self._trees, self._caches, self._plan = programs, trees, caches, plan
        self._kind, self._sizes, self._compiler, self._whole = kind, sizes, compiler, whole
        self._table = _SlotTable(plan, kind, vocabulary)
        self._slots = make_sequences(plan, vocabulary, kind.features, place_of(trees))
        self._scheduler = Scheduler(plan, STEPS, remembers=programs.extends, rewinds=programs.rewinds)
        self._under_way = deque[tuple[Work, Any]]()
        _OPEN.add(self)

    @property
    def is_busy(self) -> bool:
        """Return whether answers have not ended."""
        return bool(self._under_way) or not self._scheduler.is_done

    def add(self, answers: Sequence[Answer], stop: Collection[int]) -> None:
        """Add answers, which end at these tokens and those of their requests, to the end of the queue."""
        self._table.add(answers, stop)
        self._scheduler.add(answers)

    def end(self, answer: Answer) -> None:
        """End an answer early."""
        self._scheduler.end(answer)
        self._table.remove(answer)

    def close(self) -> None:
        """Leave out what threads would compile for the answers to come, and wait for what they compile.

        What follows, such as a training step, has the memory and the device for itself; at the end of the process
        windows under way would abort it.
        """
        self._sizes.give_up()
        jax.block_until_ready([results for _, results in self._under_way])
        if self._whole:
            self._sizes.wait()

    def advance(self) -> Iterator[tuple[Answer, Int[np.ndarray, " n"], Finish | None]]:
        """Start a window, and yield the answers of the one before with their new tokens, and why they ended."""
        work = None if self._scheduler.is_done else self._scheduler.next()
        if work:
            self._under_way.append((work, self._dispatch(work)))
        if self._under_way and (not work or len(self._under_way) > 1):
            yield from self._receive(*self._under_way.popleft())

    def _dispatch(self, work: Work) -> Sampled:
        """Start the prefill and the window; return its results to come."""
        for row in work.rows:
            self._prefill(row)
        for row in work.suffix_rows:
            self._extend(row)
        self._copy_pages(work)
        if penalized := [answer for answer in work.fresh if answer.request.sampling.has_penalties]:
            self._count(penalized)
        size, run = self._sizes.take(len(work.answers), self._whole)
        arguments = self._trees, self._slots, self._caches, self._table.window(work, size)
        options: dict[str, Any] = {"plan": self._plan, "steps": STEPS, "features": self._kind.features}
        if run is None:
            run = partial(self._programs.window if self._whole else self._programs.window_by_layers, **options)
            if self._whole:
                self._sizes.put(run)
        if self._compiler:
            shapes, precision = jax.tree.map(_shape, arguments), jax.config.jax_default_matmul_precision
            self._sizes.compile(self._compiler, partial(_compile, self._programs, shapes, options, precision))
        self._slots, self._caches, sampled = run(*arguments)
        jax.tree.map(lambda x: x.copy_to_host_async(), sampled)
        return sampled

    def _prefill(self, row: Sequence[Prefill]) -> None:
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
        slots: Any = np.full(segments.slots, self._plan.slots, np.int32)
        slots[: len(row)] = [prompt.slot for prompt in row]
        options: Any = {"slots": slots, "windows": self._programs.windows}
        options["ranks"] = self._ranks(row[:1], [1]) if T > PREFILL_TOKENS else self._ranks(row, lengths, T)
        places: Any = Places(pages=pages, offsets=offsets, **options)
        self._caches = self._programs.prefill(self._trees, tokens, segments, places, self._caches)

    def _extend(self, row: Sequence[Prefill]) -> None:
        """Run the prompts' rests after the beginnings in the cache, a row of the cache's table for each token."""
        used = sum(len(prompt.tokens) - prompt.begin for prompt in row)
        T = _SHORT_SUFFIX if used <= _SHORT_SUFFIX else LONGEST_SUFFIX
        zeros: Any = partial(np.zeros, dtype=np.int32)
        rope: Any = None  # made by `extend`
        tokens, positions, slots, pages = (zeros(T) for _ in range(4))
        tables = zeros((T, self._plan.table))
        slots[:], end = self._plan.slots, 0
        for prompt in row:
            begin, end = end, end + len(prompt.tokens) - prompt.begin
            tokens[begin:end], slots[begin:end] = prompt.tokens[prompt.begin :], prompt.slot
            positions[begin:end] = np.arange(prompt.begin, len(prompt.tokens))
            tables[begin:end, : len(prompt.pages)] = prompt.pages
            pages[begin:end] = np.array(prompt.pages, np.int32)[positions[begin:end] // PAGE]
        ranks = self._ranks(row, [len(prompt.tokens) - prompt.begin for prompt in row], T)
        options: Any = {"windows": self._programs.windows, "ranks": ranks}
        places = Places(pages=(pages,), offsets=positions % PAGE, slots=slots, **options)
        cursor = Cursor(places=places, tables=(tables,), slots=slots, positions=positions, rope=rope)
        self._caches = self._programs.extend(self._trees, tokens, cursor, self._caches)

    def _ranks(self, row: Sequence[Prefill], lengths: Sequence[int], rows: int = 1) -> Any:
        """Return the ranks that each token of prompts uses, in so many rows; None where all use all."""
        if not self._kind.ranks:
            return None
        own = [prompt.ranks if prompt.ranks is not None else np.ones(self._kind.ranks, bool) for prompt in row]
        used = np.repeat(own, lengths, axis=0)
        return np.pad(used, ((0, rows - len(used)), (0, 0)))

    def _places(self, prompt: Prefill, window: int | None) -> Int[np.ndarray, " n"]:
        """Return the page of each token of a prompt; 0 for those that a layer with this window has no more."""
        page = np.arange(len(prompt.tokens)) // PAGE
        if window is None:
            return np.array(prompt.pages, np.int32)[page]
        ring = self._plan.ring(window)
        table: Any = ring_table(np.array([prompt.slot]), ring, self._plan.table)  # type: ignore[arg-type]
        return np.where(page > page[-1] - ring, table[0, page], 0)

    def _copy_pages(self, work: Work) -> None:
        """Copy the pages and states of prompts that answers of their own continue."""
        if not work.slot_copies:
            return
        slots: Any = np.array(work.slot_copies, np.int32)
        copies = []
        for window in self._programs.windows:
            pairs = np.array(work.page_copies, np.int32).reshape(-1, 2)
            if window is not None:
                ring = self._plan.ring(window)
                pairs = np.stack([ring_table(slots[:, i], ring, ring).ravel() for i in range(2)], axis=1)
            copies.append(np.pad(pairs, ((0, _power_of_two(len(pairs)) - len(pairs)), (0, 0))).astype(np.int32))
        sources, targets = (tuple(pairs[:, i] for pairs in copies) for i in range(2))
        pad = (0, _power_of_two(len(slots)) - len(slots)), (0, 0)
        states = np.pad(slots, pad, constant_values=self._plan.slots).T
        self._caches = self._programs.copy(self._caches, Copies(sources, targets, tuple(states)))  # type: ignore[arg-type]

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
        counts = (steps.tokens != IDLE).sum(0).tolist()
        for column, (answer, count) in enumerate(zip(work.answers, counts, strict=False)):
            answer.windows -= 1
            if not count or answer.length >= answer.end:
                continue  # it ended in the last window, or the caller ended it
            if answer.matcher:
                count = answer.matcher.take(steps.tokens[:count, column].tolist())
            parts = steps.log_probs, steps.model_log_probs, steps.top_tokens, steps.top_log_probs
            tokens = Tokens(*(part[:count, column] for part in (steps.tokens, *parts)))
            ended = self._ended(answer, tokens)
            self._scheduler.receive(answer, tokens, ended is not None)
            if ended:
                self._table.remove(answer)
            yield answer, tokens.ids, ended

    def _ended(self, answer: Answer, new: Tokens) -> Finish | None:
        """Return why an answer ends with its new tokens, if it does."""
        if len(new.ids) and int(new.ids[-1]) in self._table.stop_tokens(answer):
            return "stop"
        if answer.matcher and (answer.matcher.is_over or not len(new.ids)):  # none: a grammar beyond its limits
            return "stop" if answer.matcher.is_complete else "length"
        return "length" if answer.length + len(new.ids) >= answer.end else None


class _SlotTable:
    """The device's inputs for each slot's answer, in numpy; a further row stands for no answer.

    Args:
        plan: of the cache.
        kind: of the answers.
        vocabulary: of the model.
    """

    def __init__(self, plan: CachePlan, kind: Kind, vocabulary: int):
        self._nobody, self._vocabulary, rows = plan.slots, vocabulary, plan.slots + 1
        self._words = -(-vocabulary // 32) if kind.features.grammars else None
        self._answers = dict[int, tuple[Any, frozenset[int]]]()
        self._tables: Any = np.zeros((rows, plan.table), np.int32)
        self._ranks: Any = np.ones((rows, kind.ranks), bool) if kind.ranks else None
        self._filled = [0] * rows
        zeros: dict[str, Any] = {name: np.zeros(rows, np.int32) for name in ("ends", "tokens", "positions")}
        self._fields = zeros | {"stops": np.full((rows, kind.stops), -1, np.int32)}
        self._controls: dict[str, Any] = {name: np.zeros(rows, kind) for name, (_, kind) in _SETTINGS.items()}
        self._controls["keys"] = np.zeros((rows, *answer_keys([(0, 0, 0)]).shape[1:]), np.uint32)
        self._controls["bias_tokens"] = np.full((rows, kind.biases), vocabulary, np.int32)
        self._controls["biases"] = np.zeros((rows, kind.biases), np.float32)

    def add(self, answers: Sequence[Answer], stop: Collection[int]) -> None:
        """Add answers that wait, and end at these tokens or those of their requests."""
        keys = answer_keys([(a.request.sampling.seed, a.request.index, a.answer) for a in answers])
        for answer, key in zip(answers, keys, strict=True):
            self._answers[id(answer)] = key, frozenset(stop).union(answer.request.stop)

    def remove(self, answer: Answer) -> None:
        """Remove an answer that has ended."""
        self._answers.pop(id(answer), None)

    def stop_tokens(self, answer: Answer) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return self._answers[id(answer)][1]

    def window(self, work: Work, size: int) -> Window:
        """Return the window of the work's answers, padded to `size` sequences."""
        for answer in work.fresh:
            self._begin(answer)
        slots: Any = np.full(size, self._nobody, np.int32)
        slots[: len(work.answers)] = [answer.slot for answer in work.answers]
        for answer in work.answers:
            slot, count = answer.slot or 0, len(answer.pages)
            if count > (filled := self._filled[slot]):
                self._tables[slot, filled:count] = answer.pages[filled:]
                self._filled[slot] = count
        fresh: Any = np.isin(slots, np.array([answer.slot for answer in work.fresh], np.int32))
        fields = {name: rows[slots] for name, rows in self._fields.items()}
        controls = Controls(**{name: rows[slots] for name, rows in self._controls.items()})
        ranks, masks = None if self._ranks is None else self._ranks[slots], self._masks(work.answers, size)
        options: Any = {"controls": controls, "ranks": ranks, "masks": masks}
        return Window(slots=slots, fresh=fresh, tables=self._tables[slots], **fields, **options)

    def _masks(self, answers: Sequence[Answer], size: int) -> Any:
        """Return the tokens that may come next; all of them in answers without a grammar."""
        if self._words is None:
            return None
        masks = np.full((size, self._words), 0xFFFFFFFF, np.uint32)
        for row, answer in enumerate(answers):
            if answer.matcher:
                masks[row] = answer.matcher.mask()
        return masks

    def _begin(self, answer: Answer) -> None:
        slot, request, (key, stop) = answer.slot or 0, answer.request, self._answers[id(answer)]
        self._tables[slot], self._filled[slot] = 0, 0
        last = answer.received[-1].ids[-1] if answer.received else request.prompt[-1]
        fields, controls = self._fields, self._controls
        fields["ends"][slot], fields["tokens"][slot], fields["positions"][slot] = answer.end, last, answer.length - 1
        fields["stops"][slot], fields["stops"][slot, : len(stop)] = -1, sorted(stop)
        for name, (setting, _) in _SETTINGS.items():
            controls[name][slot] = getattr(request.sampling, setting)
        controls["keys"][slot] = key
        if self._ranks is not None:
            self._ranks[slot] = True if request.ranks is None else request.ranks
        controls["bias_tokens"][slot], count = self._vocabulary, len(request.logit_bias)
        controls["bias_tokens"][slot, :count] = list(request.logit_bias)
        controls["biases"][slot, :count] = list(request.logit_bias.values())


_SETTINGS = {
    "temperature": ("temperature", np.float32),
    "top_k": ("top_k", np.int32),
    "top_p": ("top_p", np.float32),
    "min_p": ("min_p", np.float32),
    "repetition": ("repetition_penalty", np.float32),
    "presence": ("presence_penalty", np.float32),
    "frequency": ("frequency_penalty", np.float32),
}
"""Settings of `SamplingConfig` and their dtypes, by the names of `Controls`."""


def _fewer(slots: int) -> list[int]:
    """Return smaller numbers of sequences: halves, and first three quarters where matmuls take longer than weights."""
    sizes = [slots * 3 // 4] if slots > _FLAT else []
    return sizes + [slots >> i for i in range(1, _HALVES + 1) if slots >> i >= _SMALLEST_SIZE]


_intervals = list[float]()
"""Switch intervals found by the threads that compile, the first of which is put back."""


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let Python's threads take turns every 0.2 ms: by default one that traces a program holds up dispatch for 5."""
    _intervals.append(sys.getswitchinterval())
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(_intervals.pop())  # the first one's, once the last has ended


def _placed(x: Any) -> Any:
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_placed(x), weak_type=getattr(x, "weak_type", False))


def _compile(programs: Programs, shapes: Any, options: dict[str, Any], precision: Any, size: int) -> Any:
    with jax.default_matmul_precision(precision) if precision else nullcontext():
        return programs.compile_window(*shapes, size=size, **options)


def _padded(count: int) -> int:
    return -(-max(count, 1) // _PADDED) * _PADDED


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
