"""The engine of generation: many answers decoded together, in windows of steps that the device runs without the host.

While a window runs, the host receives the results of the one before, refills the slots that became free, and dispatches
the next: at once, or, where answers may come meanwhile, as late as the device lets it (`DecodeBatch.spare`). So a
sequence that ends at a token is noticed one window late, and one that ends at its limit at once.
"""

import atexit
import logging
import weakref
from collections import abc, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from time import monotonic
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jaxtyping import Float, Int

from jaxglue.engine.compiler import products_of, rounding_as_written
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.decoded_experts import choose_decoded_experts
from jaxglue.generation.draft_rule import DraftCounts, DraftPace, DraftRule, StepBytes
from jaxglue.generation.drafts import Drafting, accepted
from jaxglue.generation.grammar import Grammar
from jaxglue.generation.inputs import ProgramKind, PromptInputs, SlotTable, features_of, padded_pages
from jaxglue.generation.pages import CachePlan, free_bytes, make_caches, plan_cache
from jaxglue.generation.programs import (
    IDLE,
    NOT_FINITE,
    Cache,
    DecodeWindow,
    EnginePrograms,
    EngineSlots,
    Trees,
    make_sequences,
    place_of,
    sharding_of,
)
from jaxglue.generation.prompt_programs import PromptPrograms
from jaxglue.generation.sampling import Features, Sampled
from jaxglue.generation.scheduler import Finish, PageCopy, Request, Scheduler, SchedulerOutput, Sequence, Tokens
from jaxglue.generation.window_sizes import WindowSizes
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.choices import KVCache
from jaxglue.vision.processor import Processor
from jaxglue.vision.rows import Image, PromptImages, pack_patches

_log = logging.getLogger(__name__)
STEPS = 8
"""Tokens of a window: ended answers idle for half of it, and one window more if a stop token ended them."""
_SMALLEST_IMAGES = 1024
"""Patches of a row of a prompt's images, at least, so that few are compiled."""
_SMALLEST_TEXT = 1024
"""Tokens of prompt and answer that a single answer's cache has room for, so that longer ones need no other programs."""
_MANY_STEPS = 1024
"""Decode steps from which a program of all layers, whose compile time grows with depth, is worth compiling."""
_COMPILERS, _KINDS = 3, 8
"""Threads that compile, and kinds of windows whose programs are kept on each device."""
_TOP = 20
"""Windows that report more likely tokens than their kind does, report a multiple of this, so that few are compiled."""
_HOST_SHARE = 0.5
"""Share of the host's free memory for pages of held answers."""
_LEADS, _SPREAD = 16, 0.1
"""Latest dispatches of which the longest but one is allowed for, and the part of a window's time by which it may be
shorter than others."""
_REUSED = 0.7
"""Share of the memory, and of an earlier plan, up to and from which that plan serves again."""


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


NewTokens = tuple[Sequence, Int[np.ndarray, " n"], Finish | None]
"""A sequence, its new tokens, and the reason if it ended."""
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
        drafting: a head that drafts tokens, whose weights the frozen parameters have as `draft` (the trainable ones: an
            empty tree); None decodes one token a step.
        exact: give each token the bits that training's forward pass has, whatever is decoded with it; see
            `exact.obstacle` for models that cannot.
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
        drafting: Drafting | None = None,
        exact: bool = False,
    ):
        self._exact = exact
        self._as_written, self._drafting, self._told = as_written, drafting, False
        self.drafts = DraftCounts()
        """Drafts so far."""
        self.config, self._dtype, self._ahead = config, dtype, ahead
        self.cache_dtype = jnp.float8_e4m3fn if kv_cache == "fp8" else dtype
        self._model = graphdefs, config, dtype, attention
        self._fp8_layers = [True] * len(graphdefs.layers)
        self._programs = self._make_programs()
        self._kinds = dict[Any, _Kind]()
        self._compiler = ThreadPoolExecutor(_COMPILERS, "windows")
        self._plan: CachePlan | None = None
        self.compilations = self._programs.compilations

    def multiply_in_fp8(self, layers: abc.Sequence[bool]) -> None:
        """Multiply matrices for FP8 products so in these layers alone, as training does; at first all do."""
        if list(layers) != self._fp8_layers:
            self._fp8_layers = list(layers)
            self._programs = self._make_programs()
            self.compilations = self._programs.compilations
            self._kinds.clear()

    def _make_programs(self) -> EnginePrograms:
        with rounding_as_written(self._as_written or self._exact), products_of(self._dtype):
            return EnginePrograms(*self._model, self._fp8_layers, self._drafting, exact=self._exact)

    def generate(
        self,
        trainable: Params,
        frozen: Params,
        requests: abc.Sequence[Request],
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
            stop: tokens that end every sequence.
            memory: bytes for cache and activations; by default nearly all that are free.
            slots: the most answers at a time; by default as many as memory holds.
            plan: of the cache, in place of `memory` and `slots`; by default `plan`'s.
            until: ends answers early.
            whole: compile all layers and steps of a window into one program; by default for many steps. Weights on
                several devices always run layer by layer.

        Raises:
            ValueError: before the first sequence, an empty prompt, one reaching the model's limit, a token outside its
                vocabulary, or too little memory; or logits that are not finite.
        """
        options: Any = {"memory": memory, "slots": slots, "plan": plan, "until": until, "whole": whole}
        for sequence, _, finish in self._run(trainable, frozen, requests, stop, **options):
            if finish:
                yield completion_of(sequence, finish)

    def pieces(
        self,
        trainable: Params,
        frozen: Params,
        requests: abc.Sequence[Request],
        stop: Collection[int] = (),
        **options: Any,
    ) -> Iterator[Piece]:
        """Yield the answers while they grow; arguments, `options` among them, and errors as of `generate`."""
        for sequence, tokens, finish in self._run(trainable, frozen, requests, stop, **options):
            yield Piece(sequence.number, sequence.answer, tokens.tolist(), finish)

    def stream(
        self,
        trainable: Params,
        frozen: Params,
        prompt: abc.Sequence[int],
        sampling: SamplingConfig,
        stop: Collection[int] = (),
        *,
        index: int = 0,
        grammar: Grammar | None = None,
        images: PromptImages | None = None,
        memory: float | None = None,
    ) -> Iterator[int]:
        """Yield the tokens of one answer up to a stop token (excluded); errors as of `generate`."""
        request = Request(prompt, sampling, index, grammar=grammar, images=images)
        plan = self._plan_roomy(request, memory)
        for piece in self.pieces(trainable, frozen, [request], stop, plan=plan):
            yield from (token for token in piece.tokens if token not in stop)

    def plan(
        self,
        requests: abc.Sequence[Request],
        *,
        memory: float | None = None,
        slots: int | None = None,
        limit: str = "--max-tokens",
        begun: int = 0,
    ) -> CachePlan:
        """Plan the cache for requests.

        `limit` and `begun` are as of `plan_cache`, other arguments and errors as of `generate`.
        """
        lengths = [(len(r.prompt), self._end(r, number)) for number, r in enumerate(requests, 1) for _ in range(r.n)]
        siblings = [request.n for request in requests for _ in range(request.n)]
        return self.plan_lengths(lengths, batch_size=slots, free=memory, limit=limit, siblings=siblings, begun=begun)

    def plan_lengths(self, lengths: abc.Sequence[tuple[int, int]], **options: Any) -> CachePlan:
        """Plan the cache for answers of these lengths; arguments and errors as of `plan_cache`."""
        options |= {"cache_dtype": self.cache_dtype, "rows": self._programs.rows}
        return plan_cache(lengths, self._programs.cached, self._dtype, **options)

    def _plan_roomy(self, request: Request, memory: float | None) -> CachePlan:
        """Plan the cache for an answer and longer ones, which then need no other programs, if there is memory."""
        end = self._end(request, 1)
        roomy = max(_SMALLEST_TEXT, 1 << (end - 1).bit_length())
        if roomy <= self.config.max_generated_positions:
            with suppress(ValueError):
                return self.plan_lengths([(len(request.prompt), roomy)], batch_size=1, free=memory)
        return self.plan([request], memory=memory)

    def see(self, trainable: Params, frozen: Params, images: abc.Sequence[Image], processor: Processor) -> np.ndarray:
        """Return the features [I, D] of images, one after the other, by the model's tower."""
        size = 1 << (sum(image.grid.patches for image in images) - 1).bit_length()
        patches = pack_patches([images], processor, max(size, _SMALLEST_IMAGES))
        features = self._programs.see((trainable, frozen), patches)
        return np.asarray(features)[0, : sum(processor.tokens(image.grid) for image in images)]

    @property
    def window_tokens(self) -> int:
        """Return the most tokens of a sequence that a window chooses."""
        return STEPS * self._programs.rows

    def wait(self) -> None:
        """Wait for programs that are compiled beside the answers, as measurements do."""
        for kind in self._kinds.values():
            for compiled in kind.all:
                compiled.wait()

    def _run(
        self, trainable, frozen, requests, stop, *, memory=None, slots=None, plan=None, until=None, whole=None
    ) -> Iterator[NewTokens]:
        """Yield (answer, new tokens, reason if it ended)."""
        if not requests:
            return
        plan = plan or self._earlier(self.plan(requests, memory=memory, slots=slots), memory)
        answers = [sequence for number, request in enumerate(requests) for sequence in self.answers(request, number)]
        if whole is None:
            whole = sum(sequence.end - sequence.length for sequence in answers) >= _MANY_STEPS * plan.slots
        batch = self.open(trainable, frozen, plan, ProgramKind.of(requests, stop), whole=whole, gathers=True)
        batch.add(answers, stop)
        try:
            while batch.is_busy:
                for sequence, tokens, finish in batch.advance():
                    if not finish and until and until(sequence.number, sequence.answer, sequence.new):
                        batch.end(sequence)
                        finish = "until"
                    yield sequence, tokens, finish
        finally:
            batch.close()

    def answers(self, request: Request, number: int) -> list[Sequence]:
        """Return the answers of a request, numbered, that a batch takes; errors as of `generate`."""
        end = self._end(request, number + 1)
        return [Sequence(number, index, request, end) for index in range(request.n)]

    def answer(self, request: Request, index: int) -> Sequence:
        """Return the answer of this index to a request; errors as of `generate`."""
        return Sequence(0, index, request, self._end(request, 1))

    def open(
        self,
        trainable: Params,
        frozen: Params,
        plan: CachePlan,
        kind: ProgramKind,
        *,
        whole: bool,
        gathers: bool = False,
        most_read: int | None = None,
    ) -> "DecodeBatch":
        """Return a batch without answers.

        `kind` has all that they use; `gathers` and `most_read` are as of `Scheduler`, others as of `generate`.
        """
        trees = self._programs.prepared(trainable), frozen
        self._tell_of_experts(trees, plan)
        whole = whole and sharding_of(trees) is None
        leaves = tuple((x.shape, str(x.dtype), _placed(x)) for x in jax.tree.leaves(trees))
        name = plan, kind, whole, leaves
        if name not in self._kinds and len(self._kinds) >= _KINDS * jax.local_device_count():
            del self._kinds[next(iter(self._kinds))]
        compiled = self._kinds.setdefault(name, _Kind({}, PromptPrograms()))
        compiler = self._compiler if whole or (self._ahead and sharding_of(trees) is None) else None
        programs, place, vocabulary = self._programs, place_of(trees), self.config.vocab_size
        caches = make_caches(plan, programs.cached, self.cache_dtype, self._dtype, place, programs.rows)
        states = None if programs.rows == 1 else (self.config.hidden_size, self._dtype)
        slots = make_sequences(plan, vocabulary, kind.all_features, place, states)
        pace = DraftPace(self._rule(trees), programs.rows - 1, self.drafts, waits=not self._ahead)
        options: Any = {"whole": whole, "gathers": gathers, "most_read": most_read}
        return DecodeBatch(programs, trees, caches, slots, plan, kind, compiled, compiler, vocabulary, pace, **options)

    def _rule(self, trees: Trees) -> DraftRule | None:
        """Return what decides on drafts; None where their number is fixed."""
        if self._drafting is None or not self._drafting.auto:
            return None
        output = self._model[0].output_name
        return DraftRule(StepBytes.of(self.config, trees, output, self._dtype), self._drafting.most)

    def _tell_of_experts(self, trees: Trees, plan: CachePlan) -> None:
        """Log once how experts are multiplied in decode steps, which take longer without kernels of few rows."""
        if self._told or compute_capability() is None:
            return
        self._told = True
        trainable, frozen = trees
        choice = choose_decoded_experts(self._model[0], trainable, frozen, self.config, self._dtype, plan.slots)
        if choice is not None and choice.barred is None:
            _log.info("experts: by kernels of few rows")
        elif choice is not None:
            _log.warning("experts: not by kernels of few rows: %s", choice.reason)

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
        if request.images is not None and not self._programs.sees:
            raise ValueError(f"prompt {number} has images, and the model is loaded without its tower")
        return min(count + request.sampling.max_tokens, limit)


def require_known(tokens: abc.Sequence[int] | np.ndarray, vocabulary: int, name: str) -> None:
    """Raise ValueError for a token outside the vocabulary, whose embedding would be NaN or another token's."""
    if wrong := next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None):
        raise ValueError(f"{name} holds token id {wrong}, but the model's vocabulary has {vocabulary}")


def completion_of(sequence: Sequence, finish: Finish) -> Completion:
    """Return an answer that ended for this reason."""
    columns = zip(*sequence.received, strict=True)
    ids, log_probs, model_log_probs, top_ids, top = map(np.concatenate, columns)
    most_likely = (top_ids, top) if sequence.request.top_log_probs else None
    return Completion(sequence.number, sequence.answer, ids, log_probs, model_log_probs, most_likely, finish)


SizesByKind = dict[tuple[Features, int], WindowSizes]
"""Programs of windows, by what their answers use and the drafts of their steps."""


class _Kind(NamedTuple):
    """Programs of a kind of answers."""

    sizes: SizesByKind
    rows: PromptPrograms

    @property
    def all(self) -> "list[WindowSizes | PromptPrograms]":
        """Return what threads compile."""
        return [self.rows, *self.sizes.values()]


class _Window(NamedTuple):
    """A window under way."""

    work: SchedulerOutput
    sampled: Any
    """Its results to come."""
    size: int
    """Answers for which its program is."""
    sizes: WindowSizes
    passed: Any
    """An array that is there once its prompts have passed; None without prompts."""


_OPEN: "weakref.WeakSet[DecodeBatch]" = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Wait for windows under way, as of answers to a closed pipe: XLA aborts a process that ends before them."""
    for batch in list(_OPEN):
        with suppress(Exception):
            batch.close()


class DecodeBatch:
    """Answers in progress, with the state of the device; made by `Engine.open`.

    Its kind has what most answers use: while one uses more, windows run by programs of their own; where one wants
    further likely tokens, layer by layer until these are compiled.
    """

    def __init__(
        self,
        programs: EnginePrograms,
        trees: Trees,
        caches: list[Cache],
        slots: EngineSlots,
        plan: CachePlan,
        kind: ProgramKind,
        compiled: _Kind,
        compiler: ThreadPoolExecutor | None,
        vocabulary: int,
        pace: DraftPace,
        *,
        whole: bool,
        gathers: bool,
        most_read: int | None,
    ):
        self._programs, self._trees, self._caches, self._plan = programs, trees, caches, plan
        self._kind, self._compiler, self._whole = kind, compiler, whole
        self._compiled, self._sizes, self._rows = compiled, compiled.sizes, compiled.rows
        self._foreseen = False
        """The rows of all prompts that wait are being compiled, or have been."""
        self._table = SlotTable(plan, kind, vocabulary, sees=programs.sees, exact=programs.exact)
        self._prompts = PromptInputs(plan, programs.windows, kind.ranks, programs.tile)
        self._slots, self._pace = slots, pace
        self._scheduler = Scheduler(
            plan,
            STEPS,
            remembers=programs.extends,
            rewinds=programs.rewinds,
            rows=programs.rows,
            outside=_pages_outside(plan),
            tile=programs.tile,
            gathers=gathers,
            most_read=most_read,
        )
        self._leaving = list[PageCopy]()
        """Copies of pages on their way to the host."""
        self._under_way, self._vocabulary = deque[_Window](), vocabulary
        self._drafted = 0
        """Drafts of the last window's steps."""
        self._received: float | None = None
        """When the window under way began: those before it, and its prompts, had passed; None if unknown."""
        self._due: float | None = None
        """When it was time for the next dispatch, or will be; None where nobody asked."""
        self._leads = deque[float](maxlen=_LEADS)
        """Seconds from then until the device had work, of the latest dispatches."""
        self._latest: WindowSizes | None = None
        """Programs of the windows that decode now."""
        _OPEN.add(self)

    @property
    def is_busy(self) -> bool:
        """Return whether answers have not ended."""
        return bool(self._under_way) or not self._scheduler.is_done

    def add(self, answers: abc.Sequence[Sequence], stop: Collection[int]) -> None:
        """Add answers, which end at these tokens and those of their requests, to the end of the queue."""
        self._table.add(answers, stop)
        self._scheduler.add(answers)
        self._foreseen = False

    def end(self, sequence: Sequence) -> None:
        """End an answer early."""
        self._scheduler.end(sequence)
        self._table.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Let go of the pages that an answer held when it ended."""
        self._scheduler.release(sequence)

    def interrupt(self, sequence: Sequence) -> bool:
        """Take an answer's slot, or its place among those that wait for one, for others; return whether it gives it.

        It goes on once it is added again, and not before its tokens of a window under way have come.
        """
        if sequence.ends_under_way or sequence.matcher:
            return False
        self._scheduler.interrupt(sequence)
        return True

    @property
    def cache_use(self) -> float:
        """Return the share of the cache's pages that answers hold."""
        return self._scheduler.cache_use

    def replace_adapter(self, trainable: Params) -> None:
        """Let windows from now on use other adapters, of the same shapes; texts of those before are forgotten."""
        self._trees = self._programs.prepared(trainable), self._trees[1]
        self._scheduler.forget()

    def close(self) -> None:
        """Cancel compilations that no thread has begun, and wait for the others.

        What follows, such as a training step, has the memory and the device for itself; at the end of the process
        windows under way would abort it.
        """
        for compiled in self._compiled.all:
            compiled.give_up()
        jax.block_until_ready([window.sampled for window in self._under_way])
        for compiled in self._compiled.all if self._whole else ():
            compiled.wait()

    def advance(self, resting: Collection[Sequence] = ()) -> Iterator[NewTokens]:
        """Start a window, and yield the answers of the one before with their new tokens, and why they ended.

        Args:
            resting: answers that keep their slots and do not decode in it.
        """
        work = None if self._scheduler.is_done else self._scheduler.next(resting)
        if work:
            window = self._dispatch(work)
            if not self._under_way:
                self._received = monotonic()  # nothing is before it
            self._under_way.append(window)
        if self._under_way and (not work or len(self._under_way) > 1):
            yield from self._receive(self._under_way.popleft())

    def spare(self) -> float:
        """Return for how many seconds to wait before asking again: 0 once `advance` is due, or where that is unknown.

        It is due shortly before the window under way ends: answers that are added by then are in the next one, and the
        device does not wait. The prompts in front of the one under way are waited for.
        """
        if not self._under_way:
            return 0.0
        window = self._under_way[0]
        if window.passed is not None:
            self._received = _passing(window.passed)
            self._under_way[0] = window._replace(passed=None)
        seconds, now = window.sizes.times.own(window.sizes, window.size), monotonic()
        if self._received is not None and seconds is not None and len(self._leads) > 1 and not _is_there(window):
            lead = sorted(self._leads)[-2]  # one may have compiled
            wait = self._received + (1 - _SPREAD) * seconds - lead - now
            if wait > 0:
                self._due = now + wait
                return min(wait, _SPREAD * seconds)  # it may take less time than others did
        self._due = now if self._due is None else min(self._due, now)
        return 0.0

    def _note_lead(self) -> None:
        """Note that the device has work of the next window, if it was time for it."""
        if self._due is not None and (lead := monotonic() - self._due) > 0:
            self._leads.append(lead)
        self._due = None

    def widest(self, count: int) -> int:
        """Return to how many answers a window is best filled up, as `WindowSizes.widest` does."""
        return self._plan.slots if self._latest is None else self._latest.widest(count)

    def _dispatch(self, work: SchedulerOutput) -> "_Window":
        """Start the prefill and the window; return it with its results to come."""
        programs, trees = self._programs, self._trees
        self._move_pages(work)
        features, drafts, sizes, size, run, whole = self._choose(work)
        if self._drafted not in (0, drafts):  # before prompts are written, whose states lack nothing
            self._slots, self._caches = programs.settle(trees, self._slots, self._caches)
        self._drafted = drafts
        passed = None
        rows = [self._prompts.row(row) for row in work.rows]
        self._compile_rows(rows)
        for row in rows:
            self._rows.wait_for(row)
            _, _, places, _ = row
            self._caches, last, passed = programs.prefill(trees, *row, self._caches)
            self._note_lead()
            if last is not None:
                self._slots = programs.with_prompts(self._slots, places.slots, last)
        for suffixes in work.suffix_rows:
            tokens, positions, cursor, ends, slots = self._prompts.suffixes(suffixes)
            self._caches, last, passed = programs.extend(trees, tokens, positions, cursor, ends, self._caches)
            self._note_lead()
            if last is not None:
                self._slots = programs.with_prompts(self._slots, slots, last)
        if work.slot_copies:
            copies = self._prompts.copies(work)
            self._caches = programs.copy(self._caches, copies)
            self._slots = programs.with_copies(self._slots, copies)
        if penalized := [sequence for sequence in work.fresh if sequence.request.sampling.has_penalties]:
            assert self._slots.counts is not None
            counts = programs.note(self._slots.counts, *self._prompts.counted(penalized))
            self._slots = replace(self._slots, counts=counts)
        arguments = trees, self._slots, self._caches, self._table.window(work, size, features)
        if run is None:
            options = self._options(features, drafts)
            run = partial(programs.window if whole else programs.window_by_layers, **options)
            if whole:
                sizes.put(run)
        if self._compiler:
            self._compile_beside(sizes, features, drafts, arguments[-1], len(work.answers))
        self._slots, self._caches, sampled = run(*arguments)
        self._note_lead()
        jax.tree.map(lambda x: x.copy_to_host_async(), sampled)
        self._latest = sizes
        return _Window(work, sampled, size, sizes, passed)

    def _compile_rows(self, rows: abc.Sequence[tuple[Any, ...]]) -> None:
        """Let threads compile programs for rows of prompts, and for those that prompts which wait may need later."""
        if not rows or self._compiler is None:
            return
        plain = [row for row in rows if row[-1] is None]  # images are of many sizes
        plain += [] if self._foreseen else self._prompts.to_come(self._scheduler.waiting)
        self._foreseen = True
        trees, caches = jax.tree.map(_shape, (self._trees, self._caches))
        options = {"place": place_of(self._trees), "precision": jax.config.jax_default_matmul_precision}
        self._rows.compile(self._compiler, plain, partial(_compile_row, self._programs, trees, caches, **options))

    def _move_pages(self, work: SchedulerOutput) -> None:
        """Copy pages of held answers to the host, and those that are needed again back."""
        for copy, pages in work.saves:
            copy.values = self._programs.read_pages(self._caches, padded_pages(pages))
            jax.tree.map(lambda x: x.copy_to_host_async(), copy.values)
            self._leaving.append(copy)
        for copy, pages in work.loads:
            places = padded_pages(pages)
            values = jax.tree.map(itemgetter(slice(len(places))), copy.values)
            self._caches, copy.values = self._programs.write_pages(self._caches, places, values), None

    def _choose(self, work: SchedulerOutput) -> tuple[Features, int, WindowSizes, int, Any, bool]:
        """Return what a window's answers use, its drafts, their programs, its size and program, if there is one.

        The last value tells whether programs are waited for.
        """
        kind, whole = self._kind, self._whole
        features = self._covering(self._table.features(work.answers))
        whole &= features.top == kind.features.top
        count = len(work.answers)
        drafts = self._pace.choose(
            count, work.tokens / count, lambda drafts: self._sizes_of(features, drafts).seconds(count)
        )
        sizes = self._sizes_of(features, drafts)
        size, run = sizes.take(count, whole)
        if run is None and whole and drafts != self._pace.usual and not self._pace.waits and self._compiler:
            # Others' answers would wait for the compilation: until a thread has made it, drafts are the usual ones.
            window = self._table.window(work, self._plan.slots, features)
            self._compile_beside(sizes, features, drafts, window, count)
            drafts = self._pace.usual
            sizes = self._sizes_of(features, drafts)
            size, run = sizes.take(count, whole)
        return features, drafts, sizes, size, run, whole

    def _sizes_of(self, features: Features, drafts: int) -> WindowSizes:
        """Return the programs of windows of some features; those of the last answers' drafts are for few."""
        grows = drafts != self._pace.usual and self._pace.waits
        if (features, drafts) not in self._sizes:
            times = next((sizes.times for (_, rows), sizes in self._sizes.items() if rows == drafts), None)
            made = WindowSizes(self._plan.slots, self._programs.fewest, grows=grows, times=times)
            self._sizes[features, drafts] = made
        return self._sizes[features, drafts]

    def _options(self, features: Features, drafts: int) -> dict[str, Any]:
        """Return the static arguments of windows."""
        return {"plan": self._plan, "steps": STEPS, "features": features, "drafts": drafts}

    def _covering(self, used: Features) -> Features:
        """Return the features of the programs that serve these: few kinds, so that few are compiled."""
        kind = self._kind
        if used.top > kind.features.top:
            return kind.all_features._replace(top=min(-(-used.top // _TOP) * _TOP, self._vocabulary))
        return kind.features if used.within(kind.features) else kind.all_features

    def prepare(self, request: Request) -> Future | None:
        """Let a thread compile the program of windows with answers to a request; None where nothing is waited for.

        Answers that are added before run layer by layer, whose programs hold up all others while they are compiled.
        """
        features = self._covering(features_of(request))
        if features.top == self._kind.features.top or self._compiler is None:
            return None
        sizes, drafts = self._sizes_of(features, self._pace.usual), self._pace.usual
        window = self._table.window(SchedulerOutput(), self._plan.slots, features)
        self._compile_beside(sizes, features, drafts, window, 1)
        return sizes.first_under_way()

    def _compile_beside(
        self, sizes: WindowSizes, features: Features, drafts: int, window: DecodeWindow, count: int
    ) -> None:
        """Let threads compile the programs of windows that are missing, those for so many answers first."""
        assert self._compiler is not None
        shapes = jax.tree.map(_shape, (self._trees, self._slots, self._caches, window))
        options = self._options(features, drafts)
        precision = jax.config.jax_default_matmul_precision
        sizes.compile(self._compiler, partial(_compile, self._programs, shapes, options, precision), count)

    @property
    def free_slots(self) -> int:
        """Return the slots for further answers than those that have or await one."""
        return self._scheduler.free_slots

    @property
    def beginning(self) -> int:
        """Return how many answers begin with the next window, as `Scheduler.beginning` does."""
        return self._scheduler.beginning

    def _receive(self, window: "_Window") -> Iterator[NewTokens]:
        """Yield the new tokens of a window's answers.

        Raises:
            ValueError: logits that are infinite or NaN.
        """
        if window.passed is not None:
            self._received = _passing(window.passed)
        work, steps = window.work, jax.device_get(window.sampled)
        now = monotonic()
        if self._received is not None:
            window.sizes.note(window.size, now - self._received)
        self._received = now if self._under_way else None
        for copy in self._leaving:
            copy.values = jax.device_get(copy.values)  # so that the device's copies are freed
        self._leaving.clear()
        if isinstance(steps, list):
            steps = Sampled(*map(np.stack, zip(*steps, strict=True)))  # type: ignore[arg-type]
        rows = 1
        if steps.tokens.ndim == 3:  # [steps, rows, B] of verified drafts
            rows = steps.tokens.shape[1]
            steps = jax.tree.map(lambda x: x.reshape(x.shape[0] * rows, *x.shape[2:]), steps)
        made = accepted(steps.tokens, rows, IDLE)
        self._pace.note(made.sum(1))
        if (steps.tokens == NOT_FINITE).any():
            raise ValueError("the model's logits are not finite (NaN or infinity): check its weights and the adapter")
        counts, drafted, taken = (x.tolist() for x in ((steps.tokens != IDLE).sum(0), made[0], made[1:].sum(0)))
        for column, (sequence, count) in enumerate(zip(work.answers, counts, strict=False)):
            sequence.windows -= 1
            sequence.drafted += drafted[column] * (rows - 1)
            sequence.accepted += taken[column]
            if not count or sequence.length >= sequence.end:
                continue  # it ended in the last window, or the caller ended it
            back = False
            if sequence.matcher:
                own, chosen = steps.tokens[:, column], count
                count = sequence.matcher.take(own[own != IDLE].tolist())
                back = count < chosen
            which: Any = slice(count) if rows == 1 else np.flatnonzero(steps.tokens[:, column] != IDLE)[:count]
            parts = (part[which, column] for part in (steps.tokens, steps.log_probs, steps.model_log_probs))
            most = sequence.request.top_log_probs
            likely = (part[which, column, :most] for part in (steps.top_tokens, steps.top_log_probs))
            tokens = Tokens(*(part.copy() for part in (*parts, *likely)))  # a part of a window would keep all of it
            ended = self._ended(sequence, tokens)
            self._scheduler.receive(sequence, tokens, ended is not None, back=back)
            if ended:
                self._table.remove(sequence)
            yield sequence, tokens.ids, ended

    def _ended(self, sequence: Sequence, new: Tokens) -> Finish | None:
        """Return why an answer ends with its new tokens, if it does."""
        if len(new.ids) and int(new.ids[-1]) in self._table.stop_tokens(sequence):
            return "stop"
        if sequence.matcher and (sequence.matcher.is_over or not len(new.ids)):  # none: a grammar beyond its limits
            return "stop" if sequence.matcher.is_complete else "length"
        return "length" if sequence.length + len(new.ids) >= sequence.end else None


def _passing(array: Any) -> float | None:
    """Wait for an array; return when it came, or None where it was there."""
    if array.is_ready():
        return None
    array.block_until_ready()
    return monotonic()


def _is_there(window: _Window) -> bool:
    return jax.tree.leaves(window.sampled)[-1].is_ready()


def _pages_outside(plan: CachePlan) -> int:
    """Return the pages for which the host has memory."""
    return int(_HOST_SHARE * psutil.virtual_memory().available / max(plan.bytes / (plan.pages + 1), 1))


def _placed(x: Any) -> Any:
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_placed(x), weak_type=getattr(x, "weak_type", False))


def _compile(programs: EnginePrograms, shapes: Any, options: dict[str, Any], precision: Any, size: int) -> Any:
    with jax.default_matmul_precision(precision) if precision else nullcontext():
        return programs.compile_window(*shapes, size=size, **options)


def _compile_row(
    programs: EnginePrograms, trees: Trees, caches: list[Any], row: tuple[Any, ...], *, place: Any, precision: Any
) -> None:
    with jax.default_matmul_precision(precision) if precision else nullcontext():
        programs.compile_prefill(place, trees, *jax.tree.map(_shape, row), caches)
