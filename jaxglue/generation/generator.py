"""Token generation with a paged key/value cache: one answer streamed, or many prompts in continuous batches.

Requests take slots as these become free, and all slots decode together. Rows of prompts are padded to bucketed lengths,
and a page table decouples programs from lengths, so few are compiled: one prefill and one decode step per layer type,
at any depth, and for batches one of several steps.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxglue.generation.cache import (
    PREFILL_TOKENS,
    CachePlan,
    Pages,
    PageTable,
    Slots,
    make_caches,
    places_of,
    plan_cache,
)
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.programs import NOT_FINITE, Programs, Trees, request_key
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.ops.segments import pack_segments

_SMALLEST_BUCKET = 128
_STOPS = 8
"""Stop tokens are padded to multiples of this, so that few programs are compiled."""
STEPS = 16
"""Tokens that a batch decodes between two looks at the answers that ended."""
_MANY_STEPS = 1024
"""Decode steps from which one program for all layers, whose compile time grows with depth, is worth compiling."""


@dataclass(frozen=True)
class Request:
    """A prompt to answer."""

    prompt: Sequence[int]
    """Its tokens."""
    sampling: SamplingConfig
    index: int = 0
    """Distinguishes the random numbers of prompts with one seed."""


def require_known(tokens: Sequence[int] | np.ndarray, vocabulary: int, name: str) -> None:
    """Raise ValueError for a token outside the vocabulary, whose embedding would be NaN or another token's."""
    if wrong := next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None):
        raise ValueError(f"{name} holds token id {wrong}, but the model's vocabulary has {vocabulary}")


class Sequenced(NamedTuple):
    """A request in the order of arrival."""

    number: int
    request: Request
    end: int
    """Limit of prompt and answer together."""


class Piece(NamedTuple):
    """New tokens of an answer."""

    number: int
    """Index of the request."""
    tokens: list[int]
    ended: bool


class Batch:
    """Requests being answered.

    Args:
        programs, trees: the model.
        requests: in order.
        plan, caches: of the key/value cache.
        stop: tokens that end an answer.
    """

    def __init__(
        self,
        programs: Programs,
        trees: Trees,
        requests: Sequence[Sequenced],
        plan: CachePlan,
        caches: list[Pages],
        stop: Collection[int],
    ):
        self._programs, self._trees, self._plan, self._caches = programs, trees, plan, caches
        self._pending, self._pages = deque(requests), PageTable(plan)
        self._stop, self._held = frozenset(stop), dict[int, Sequenced]()
        self._slots: Any = _idle(plan)
        self._stops: Any = _padded(stop)

    def pieces(self, *, steps: int, whole: bool) -> Iterator[Piece]:
        """Yield new tokens of the requests, after every `steps` tokens of all slots.

        Args:
            steps: tokens of a slot between two looks at those that ended.
            whole: run these steps as one program, which takes longer to compile than one for each layer type.
        """
        while self._pending or self._held:
            for row in _rows(self._admit()):
                yield from self._prefill(row)
            if self._held:
                yield from self._decode(steps, whole)

    def end(self, number: int) -> None:
        """End a request's answer early."""
        self._free(next(slot for slot, held in self._held.items() if held.number == number))

    def _admit(self) -> list[tuple[int, int]]:
        """Give free slots to waiting requests while there are pages; return (slot, tokens of the prompt) of these."""
        admitted = []
        for slot in range(self._plan.slots):
            if not self._pending or slot in self._held:
                continue
            if (pages := self._pages.lend(slot, self._pending[0].end)) is None:
                break
            self._held[slot] = self._pending.popleft()
            self._fill(slot, pages)
            admitted.append((slot, len(self._held[slot].request.prompt)))
        return admitted

    def _fill(self, slot: int, pages: Sequence[int]) -> None:
        _, request, end = self._held[slot]
        slots, sampling = self._slots, request.sampling
        slots.tables[slot] = 0
        slots.tables[slot, : len(pages)] = pages
        slots.positions[slot], slots.ends[slot] = len(request.prompt) - 1, end
        slots.keys[slot] = request_key(sampling.seed, request.index)
        slots.temperatures[slot], slots.top_ps[slot] = sampling.temperature, sampling.top_p

    def _prefill(self, row: Sequence[int]) -> Iterator[Piece]:
        """Run the prompts of some slots in one packed row, and yield their first tokens."""
        prompts = [self._held[slot].request.prompt for slot in row]
        lengths = [len(prompt) for prompt in prompts]
        used, T = sum(lengths), _bucket(sum(lengths))
        tokens: Any = np.zeros((1, T), np.int32)
        tokens[0, :used] = np.concatenate(prompts)
        segments = pack_segments([lengths], seq_len=T, max_segments=self._plan.slots)
        owners: Any = np.repeat(row, lengths)
        places = places_of(self._slots.tables, owners, segments.positions[0, :used])
        places = jax.tree.map(lambda x: np.pad(x, (0, T - used)), places)  # padding belongs to page 0
        x = self._programs.prefill(self._trees, tokens, segments, places, self._caches)
        index: Any = np.zeros(self._plan.slots, np.int32)
        new: Any = np.zeros(self._plan.slots, bool)
        index[row], new[row] = np.cumsum(lengths) - 1, True
        first = self._programs.first(self._trees, x, index, replace(self._slots, live=new), self._stops)
        yield from self._receive(row, np.asarray(first)[:, None])

    def _receive(self, row: Sequence[int], new: Int[np.ndarray, "S steps"]) -> Iterator[Piece]:
        """Yield the new tokens of these slots, and free those that ended.

        Raises:
            ValueError: logits that are infinite or NaN.
        """
        if (new[list(row)] == NOT_FINITE).any():
            raise ValueError("the model's logits are not finite (NaN or infinity): check its weights and the adapter")
        for slot in row:
            tokens = [token for token in new[slot].tolist() if token >= 0]
            yield self._piece(slot, tokens)

    def _piece(self, slot: int, tokens: list[int]) -> Piece:
        number, _, end = self._held[slot]
        slots = self._slots
        slots.positions[slot] += len(tokens)
        ended = tokens[-1] in self._stop or slots.positions[slot] + 1 >= end
        slots.tokens[slot], slots.live[slot] = tokens[-1], not ended
        if ended:
            self._free(slot)
        return Piece(number, [token for token in tokens if token not in self._stop], ended)

    def _free(self, slot: int) -> None:
        self._pages.take_back(slot)
        del self._held[slot]
        self._slots.live[slot], self._slots.tables[slot], self._slots.positions[slot] = False, 0, 0

    def _decode(self, steps: int, whole: bool) -> Iterator[Piece]:
        """Decode up to `steps` tokens of every slot."""
        new: Any
        if whole:
            _, self._caches, new = self._programs.run(self._trees, self._slots, self._caches, self._stops, steps=steps)
        else:
            new = self._layer_by_layer(steps)
        yield from self._receive(list(self._held), np.asarray(new))

    def _layer_by_layer(self, steps: int) -> Int[np.ndarray, "S steps"]:
        slots, columns = self._slots, []
        for _ in range(steps):
            slots, self._caches, tokens = self._programs.step(self._trees, slots, self._caches, self._stops)
            columns.append(tokens)
        return np.stack(jax.device_get(columns), axis=1)


def _rows(admitted: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield slots whose prompts, of these lengths, share a row of `PREFILL_TOKENS`."""
    row, used = list[int](), 0
    for slot, length in admitted:
        if row and used + length > PREFILL_TOKENS:
            yield row
            row, used = [], 0
        row.append(slot)
        used += length
    if row:
        yield row


def _idle(plan: CachePlan) -> Slots:
    """Return slots without sequences, in numpy."""
    kinds: dict[str, Any] = {"tokens": np.int32, "positions": np.int32, "ends": np.int32, "live": bool}
    kinds |= {"temperatures": np.float32, "top_ps": np.float32}
    fields: dict[str, Any] = {name: np.zeros(plan.slots, kind) for name, kind in kinds.items()}
    tables, keys = (plan.slots, plan.table), (plan.slots, *request_key(0, 0).shape)
    return Slots(tables=np.zeros(tables, np.int32), keys=np.zeros(keys, np.uint32), **fields)  # type: ignore[arg-type]


def _padded(stop: Collection[int]) -> Int[np.ndarray, " n"]:
    return np.array([*sorted(stop), *[-1] * (-len(stop) % _STOPS)], np.int32)


def _bucket(length: int) -> int:
    """Return the padded length for `length` tokens, a power of two."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())


class Generator:
    """Token generator for a model split by `split_model`.

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
        self.compilations = self._programs.compilations

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
        """Yield new tokens up to a stop token (excluded), `max_tokens` or the model's limit.

        Args:
            trainable, frozen: the parameters.
            prompt: tokens to continue.
            sampling: distribution and most tokens.
            stop: tokens that end the answer.
            index: see `Request`.

        Raises:
            ValueError: an empty prompt, one reaching the model's limit, or a token outside its vocabulary.
        """
        request = Request(prompt, sampling, index)
        batch = self._batch((trainable, frozen), [request], self.plan([request], 1), stop)
        for piece in batch.pieces(steps=1, whole=False):
            yield from piece.tokens

    def answers(
        self,
        trainable: Params,
        frozen: Params,
        requests: Sequence[Request],
        stop: Collection[int] = (),
        *,
        plan: CachePlan | None = None,
        until: Callable[[int, list[int]], bool] | None = None,
        whole: bool | None = None,
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (number, new tokens) of every request as it ends; each is what `stream` yields for it.

        Args:
            trainable, frozen: the parameters.
            requests: numbered in order.
            stop: tokens that end an answer.
            plan: of the cache; by default `plan`'s.
            until: `until(number, tokens)` ends an answer, which may hold tokens after the decisive one.
            whole: compile all layers and several steps into one program; by default for many steps. Weights on
                several devices always run layer by layer.

        Raises:
            ValueError: as `stream`, before the first answer, or as `plan`.
        """
        trees, tokens = (trainable, frozen), [list[int]() for _ in requests]
        if not requests:
            return
        plan = plan or self.plan(requests)
        if whole is None:
            whole = sum(request.sampling.max_tokens for request in requests) >= _MANY_STEPS * plan.slots
        batch = self._batch(trees, requests, plan, stop)
        for number, new, ended in batch.pieces(steps=STEPS, whole=whole and _sharding(trees) is None):
            tokens[number] += new
            if not ended and until and until(number, tokens[number]):
                batch.end(number)
                ended = True
            if ended:
                yield number, tokens[number]

    def plan(self, requests: Sequence[Request], batch_size: int | None = None) -> CachePlan:
        """Plan the cache for requests, by default with as many at a time as free memory holds.

        Raises:
            ValueError: a prompt that `stream` refuses, or too little memory.
        """
        lengths = [self._end(request, number) for number, request in enumerate(requests, 1)]
        return plan_cache(lengths, self.config, self._dtype, batch_size=batch_size)

    def _batch(self, trees: Trees, requests: Sequence[Request], plan: CachePlan, stop: Collection[int]) -> Batch:
        numbered = [Sequenced(i, request, self._end(request, i + 1)) for i, request in enumerate(requests)]
        caches = make_caches(plan, self.config, self._dtype, _sharding(trees))
        return Batch(self._programs, trees, numbered, plan, caches, stop)

    def _end(self, request: Request, number: int) -> int:
        """Return the limit of prompt and answer together, after checking the prompt."""
        limit, vocabulary, count = self.config.max_generated_positions, self.config.vocab_size, len(request.prompt)
        if not 0 < count < limit:
            raise ValueError(f"prompt {number} has {count:,} tokens: expected 1 to {limit - 1:,}, the model's limit")
        require_known(request.prompt, vocabulary, f"prompt {number}")
        return min(count + request.sampling.max_tokens, limit)


def _sharding(trees: Trees) -> jax.sharding.Sharding | None:
    """Return the sharding of a value that all devices of the weights hold; None for a single device."""
    sharding = next((leaf.sharding for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)), None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.device_set) == 1:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
