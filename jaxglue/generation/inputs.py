"""Inputs of the compiled programs, in numpy: prompts in packed rows, pages to copy, and the answers of each slot."""

from collections import abc
from collections.abc import Collection
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxglue.generation.contexts import Cursor, Places
from jaxglue.generation.pages import PAGE, PREFILL_TOKENS, PROMPTS, CachePlan, pages_of, ring_table
from jaxglue.generation.programs import CacheCopies, DecodeWindow
from jaxglue.generation.sampling import Controls, Features
from jaxglue.generation.scheduler import LONGEST_SUFFIX, Prefill, Request, SchedulerOutput, Sequence
from jaxglue.ops.segments import PackedSegments, aligned, pack_forks, pack_segments, segment_bucket
from jaxglue.vision.rows import Images, pack_prompts

_SMALLEST_ROW, _SHORT_SUFFIX = 128, 64
_PADDED = 8
"""Lists of stop tokens and biases are padded to multiples of this, so that few programs are compiled."""
_SHORT_PROMPT, _FEW = 8, 16
"""Tokens of a row for each of which it has room for a prompt, and prompts for which it has room at least."""


def features_of(request: Request) -> Features:
    """Return what an answer to a request uses."""
    sampling = request.sampling
    draws = sampling.temperature > 0
    return Features(
        draws=draws,
        top_k=draws and sampling.top_k > 0,
        top_p=draws and sampling.top_p < 1,
        min_p=draws and sampling.min_p > 0,
        penalties=sampling.has_penalties,
        grammars=request.grammar is not None,
        biases=bool(request.logit_bias),
        top=request.top_log_probs,
    )


class ProgramKind(NamedTuple):
    """Settings that a batch's answers use; each kind has programs of its own."""

    features: Features
    """Features that most of them use."""
    stops: int
    """Stop tokens of an answer, at most."""
    biases: int
    """Tokens of an answer that have a bias, at most."""
    ranks: int = 0
    """Ranks of the adapters, of which answers use some; 0 where all use all."""
    rare: Features | None = None
    """Features of windows in which some answer uses more; None if none does."""

    @classmethod
    def of(cls, requests: abc.Sequence[Request], stop: Collection[int]) -> "ProgramKind":
        """Return the kind of these requests."""
        stops = max(len(set(stop).union(request.stop)) for request in requests)
        biases = max(len(request.logit_bias) for request in requests)
        ranks = max(0 if request.ranks is None else len(request.ranks) for request in requests)
        return cls(Features.union(map(features_of, requests)), _padded(stops), _padded(biases), ranks)

    @property
    def all_features(self) -> Features:
        """Return what any answer uses, but for further likely tokens."""
        return self.features if self.rare is None else self.rare


class SlotTable:
    """The device's inputs for each slot's answer, in numpy; a further row stands for no answer.

    Args:
        plan: of the cache.
        kind: of the answers.
        vocabulary: of the model.
        sees: the model sees images, behind which positions in rotation differ from those of the cache.
        exact: answers have training's bits.
    """

    def __init__(self, plan: CachePlan, kind: ProgramKind, vocabulary: int, *, sees: bool = False, exact: bool = False):
        self._exact = exact
        self._nobody, self._vocabulary, rows = plan.slots, vocabulary, plan.slots + 1
        self._words = -(-vocabulary // 32) if kind.all_features.grammars else None
        self._stops = dict[int, frozenset[int]]()
        self._used = dict[int, Features]()
        """Features of answers by their ids."""
        self._tables: Any = np.zeros((rows, plan.table), np.int32)
        self._ranks: Any = np.ones((rows, kind.ranks), bool) if kind.ranks else None
        self._deltas: Any = np.zeros(rows, np.int32) if sees else None
        self._filled = [0] * rows
        names = ("ends", "tokens", "positions", *(("forks",) if exact else ()))
        zeros: dict[str, Any] = {name: np.zeros(rows, np.int32) for name in names}
        self._fields = zeros | {"stops": np.full((rows, kind.stops), -1, np.int32)}
        self._controls: dict[str, Any] = {name: np.zeros(rows, kind) for name, (_, kind) in _SETTINGS.items()}
        self._controls["names"] = np.zeros((rows, 3), np.uint32)
        self._controls["bias_tokens"] = np.full((rows, kind.biases), vocabulary, np.int32)
        self._controls["biases"] = np.zeros((rows, kind.biases), np.float32)

    def add(self, answers: abc.Sequence[Sequence], stop: Collection[int]) -> None:
        """Add answers that wait, and end at these tokens or those of their requests."""
        for sequence in answers:
            self._stops[id(sequence)] = frozenset(stop).union(sequence.request.stop)
            self._used[id(sequence)] = features_of(sequence.request)

    def remove(self, sequence: Sequence) -> None:
        """Remove an answer that has ended."""
        self._stops.pop(id(sequence), None)
        self._used.pop(id(sequence), None)

    def features(self, answers: abc.Iterable[Sequence]) -> Features:
        """Return what answers use."""
        return Features.union({self._used[id(sequence)] for sequence in answers})

    def stop_tokens(self, sequence: Sequence) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return self._stops[id(sequence)]

    def window(self, work: SchedulerOutput, size: int, features: Features) -> DecodeWindow:
        """Return the window of the work's answers, padded to `size` sequences, whose answers have these features."""
        for sequence in work.fresh:
            self._begin(sequence)
        slots: Any = np.full(size, self._nobody, np.int32)
        slots[: len(work.answers)] = [sequence.slot for sequence in work.answers]
        for sequence in work.answers:
            slot, count = sequence.slot or 0, len(sequence.pages)
            if count > (filled := self._filled[slot]):
                self._tables[slot, filled:count] = sequence.pages[filled:]
                self._filled[slot] = count
        fresh: Any = np.isin(slots, np.array([sequence.slot for sequence in work.fresh], np.int32))
        fields = {name: rows[slots] for name, rows in self._fields.items()}
        controls = Controls(**{name: rows[slots] for name, rows in self._controls.items()})
        ranks = None if self._ranks is None else self._ranks[slots]
        masks = self._masks(work.answers, size) if features.grammars else None
        deltas = None if self._deltas is None else self._deltas[slots]
        options: Any = {"controls": controls, "ranks": ranks, "masks": masks, "deltas": deltas}
        return DecodeWindow(slots=slots, fresh=fresh, tables=self._tables[slots], **fields, **options)

    def _masks(self, answers: abc.Sequence[Sequence], size: int) -> Any:
        """Return the tokens that may come next; all of them in answers without a grammar."""
        assert self._words is not None
        masks = np.full((size, self._words), 0xFFFFFFFF, np.uint32)
        for row, sequence in enumerate(answers):
            if sequence.matcher:
                masks[row] = sequence.matcher.mask()
        return masks

    def _begin(self, sequence: Sequence) -> None:
        slot, request, stop = sequence.slot or 0, sequence.request, self._stops[id(sequence)]
        self._tables[slot], self._filled[slot] = 0, 0
        last = sequence.received[-1].ids[-1] if sequence.received else request.prompt[-1]
        fields, controls = self._fields, self._controls
        fields["ends"][slot], fields["tokens"][slot] = sequence.end, last
        fields["positions"][slot] = sequence.length - 1
        if self._exact:
            fields["forks"][slot] = len(request.prompt) - 1
        fields["stops"][slot], fields["stops"][slot, : len(stop)] = -1, sorted(stop)
        for name, (setting, _) in _SETTINGS.items():
            controls[name][slot] = getattr(request.sampling, setting)
        numbers = request.sampling.seed, request.index, sequence.answer
        controls["names"][slot] = [number & 0xFFFFFFFF for number in numbers]
        if self._deltas is not None:
            self._deltas[slot] = 0 if request.images is None else request.images.delta
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


def row_tokens(used: int, prompts: int) -> int:
    """Return T, the tokens of a row for so many tokens of so many prompts."""
    return max(_SMALLEST_ROW, _power_of_two(used), _power_of_two(_SHORT_PROMPT * prompts))


def row_sizes(rooms: abc.Sequence[int]) -> set[int]:
    """Return the sizes of rows that prompts with so many tokens may need, any of which begin together in this order."""
    sizes = set[int]()
    for first in range(len(rooms)):
        used = accumulate(rooms[first : first + PROMPTS])
        sizes |= {row_tokens(tokens, n) for n, tokens in enumerate(used, 1) if n == 1 or tokens <= PREFILL_TOKENS}
    return sizes


class PromptInputs:
    """Makes the inputs of programs that write prompts to the cache.

    Args:
        plan: of the cache.
        windows: of the model's attention, as `EnginePrograms.windows`.
        ranks: of the adapters, of which prompts use some; 0 where all use all.
        tile: tokens at whose multiples parts of prompts begin in a row, as in training with exact sampling; None for
            prompts side by side.
    """

    def __init__(self, plan: CachePlan, windows: tuple[int | None, ...], ranks: int, tile: int | None = None):
        self._plan, self._windows, self._all_ranks, self._tile = plan, windows, ranks, tile

    def row(self, row: abc.Sequence[Prefill]) -> tuple[Any, PackedSegments, Places, Images | None]:
        """Return one packed row of prompts: tokens [1, T], segments, where their keys and values go, and images."""
        lengths = [prompt.room for prompt in row]
        used, firsts = sum(lengths), [0, *accumulate(lengths)]
        T = row_tokens(used, len(row))
        places = np.concatenate([first + prompt.places for first, prompt in zip(firsts, row, strict=False)])
        tokens: Any = np.zeros((1, T), np.int32)
        tokens[0, places] = np.concatenate([prompt.tokens for prompt in row])
        most = max(min(segment_bucket(self._plan.slots), T // _SHORT_PROMPT, PROMPTS), _FEW)  # for T, so one program
        if self._tile is None:
            segments = pack_segments([lengths], seq_len=T, max_segments=most)
        else:
            forks = [[(prompt.fork, len(prompt.tokens) - prompt.fork) for prompt in row]]
            segments = pack_forks(forks, seq_len=T, max_segments=most, tile=self._tile)
        pages: Any = tuple(np.zeros(T, np.int32) for _ in self._windows)
        for kind, window in zip(pages, self._windows, strict=True):
            kind[places] = np.concatenate([self._places(prompt, window) for prompt in row])
        offsets: Any = segments.positions[0] % PAGE
        slots: Any = np.full(segments.slots, self._plan.slots, np.int32)
        slots[: len(row)] = [prompt.slot for prompt in row]
        options: Any = {"slots": slots, "windows": self._windows}
        options["ranks"] = self._ranks(row[:1], [1]) if T > PREFILL_TOKENS else self._ranks(row, lengths, T)
        prompts = [(first, len(p.tokens), p.images) for first, p in zip(firsts, row, strict=False)]
        written: Any = Places(pages=pages, offsets=offsets, **options)
        return tokens, segments, written, pack_prompts(prompts, T)

    def to_come(self, requests: abc.Sequence[Request]) -> list[tuple[Any, PackedSegments, Places, Images | None]]:
        """Return a row, of nobody's prompt, of each size that requests which wait may need; of images none is known."""
        plain = [request for request in requests if request.images is None and request.after is None]
        rooms = [aligned(len(request.prompt) - 1, self._tile or 1) for request in plain if len(request.prompt) > 1]
        return [self._nobodys(size) for size in sorted(row_sizes(rooms))]

    def _nobodys(self, size: int) -> tuple[Any, PackedSegments, Places, Images | None]:
        """Return a row of this size whose prompt is nobody's."""
        tokens = np.zeros(size // 2 + 1, np.int32)
        pages, tile = [0] * pages_of(len(tokens)), self._tile or 1
        return self.row([Prefill(tokens, self._plan.slots, pages, fork=len(tokens), tile=tile)])

    def suffixes(self, row: abc.Sequence[Prefill]) -> tuple[Any, Any, Cursor, Any, Any]:
        """Return the rests of prompts that begin in the cache: tokens [T], their positions in rotation, table rows.

        Then follow the prompts' last rows, and their slots; nobody's where there are fewer.
        """
        used = sum(prompt.missing for prompt in row)
        T = _SHORT_SUFFIX if used <= _SHORT_SUFFIX else LONGEST_SUFFIX
        zeros: Any = partial(np.zeros, dtype=np.int32)
        rope: Any = None  # made by `extend`
        tokens, positions, turned, slots, pages, forks = (zeros(T) for _ in range(6))
        tables = zeros((T, self._plan.table))
        slots[:], end = self._plan.slots, 0
        for prompt in row:
            begin, end = end, end + prompt.missing
            tokens[begin:end], slots[begin:end] = prompt.tokens[prompt.begin :], prompt.slot
            positions[begin:end] = np.arange(prompt.begin, len(prompt.tokens))
            turned[begin:end] = positions[begin:end] + (0 if prompt.images is None else prompt.images.delta)
            tables[begin:end, : len(prompt.pages)], forks[begin:end] = prompt.pages, prompt.fork
            pages[begin:end] = np.array(prompt.pages, np.int32)[positions[begin:end] // PAGE]
        ranks = self._ranks(row, [prompt.missing for prompt in row], T)
        options: Any = {"windows": self._windows, "ranks": ranks}
        places = Places(pages=(pages,), offsets=positions % PAGE, slots=slots, **options)
        at: Any = {"slots": slots, "positions": positions, "forks": None if self._tile is None else forks}
        cursor = Cursor(places=places, tables=(tables,), rope=rope, **at)
        last = np.cumsum([prompt.missing for prompt in row]) - 1
        pad = 0, max(_power_of_two(len(row)), _PADDED) - len(row)
        owners = np.pad([prompt.slot for prompt in row], pad, constant_values=self._plan.slots)
        return tokens, turned, cursor, np.pad(last, pad).astype(np.int32), owners.astype(np.int32)

    def _ranks(self, row: abc.Sequence[Prefill], lengths: abc.Sequence[int], rows: int = 1) -> Any:
        """Return the ranks that each token of prompts uses, in so many rows; None where all use all."""
        if not self._all_ranks:
            return None
        own = [prompt.ranks if prompt.ranks is not None else np.ones(self._all_ranks, bool) for prompt in row]
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

    def copies(self, work: SchedulerOutput) -> CacheCopies:
        """Return the pages and states of prompts that further answers continue, and theirs."""
        slots: Any = np.array(work.slot_copies, np.int32)
        size, copies = _power_of_eight(len(slots)), []
        for window in self._windows:
            pairs = np.array(work.page_copies, np.int32).reshape(-1, 2)
            if window is not None:
                ring = self._plan.ring(window)
                pairs = np.stack([ring_table(slots[:, i], ring, ring).ravel() for i in range(2)], axis=1)
            count = max(_power_of_eight(len(pairs)), size)
            copies.append(np.pad(pairs, ((0, count - len(pairs)), (0, 0))).astype(np.int32))
        sources, targets = (tuple(pairs[:, i] for pairs in copies) for i in range(2))
        pad = (0, size - len(slots)), (0, 0)
        states = np.pad(slots, pad, constant_values=self._plan.slots).T
        return CacheCopies(sources, targets, tuple(states))  # type: ignore[arg-type]

    def counted(self, fresh: abc.Sequence[Sequence]) -> tuple[Any, Any, Any]:
        """Return slots, known tokens, and which of these are the answers' own, as `EnginePrograms.note` counts them."""
        count, length = _power_of_eight(len(fresh)), _power_of_two(max(PAGE, *(each.length for each in fresh)))
        slots: Any = np.full(count, self._plan.slots, np.int32)
        tokens: Any = np.full((count, length), -1, np.int32)
        new: Any = np.zeros((count, length), bool)
        for i, sequence in enumerate(fresh):
            slots[i], tokens[i, : sequence.length] = sequence.slot, sequence.tokens
            new[i, len(sequence.request.prompt) :] = True
        return slots, tokens, new


def padded_pages(pages: abc.Sequence[int]) -> Int[np.ndarray, " n"]:
    """Return pages, padded with nobody's to a power of two, so that few programs are compiled."""
    return np.pad(np.array(pages, np.int32), (0, _power_of_two(len(pages)) - len(pages)))


def _padded(count: int) -> int:
    return -(-max(count, 1) // _PADDED) * _PADDED


def _power_of_eight(count: int) -> int:
    """Return a size for which few programs are compiled, of work that takes little."""
    return 8 if count <= 8 else 8 * _power_of_eight(-(-count // 8))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
