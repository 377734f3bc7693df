"""Data sets of two answers to a prompt: selection of the units, and their packed batches."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from jaxglue.data.batch import CHOSEN, PARTS, PROMPT, REJECTED, Answers, Batch
from jaxglue.data.config import NO_COLUMNS, AnswerTask, Columns, DataConfig, Source
from jaxglue.data.dataset import Selection, TokenDataset, overlong_error, read_columns, row_origin
from jaxglue.data.images import DocumentPart, ImageReader, ImageRules
from jaxglue.data.labeled import last_tokens
from jaxglue.data.packing import PackPlan
from jaxglue.data.store import TokenStore
from jaxglue.ops.segments import BatchKind, PackedSegments, copy_beginnings, pack_forks, pack_segments, segment_bucket
from jaxglue.settings.config import stable_repr

_DIGESTED = ("labeled", "shared_prompt", "prompt_loss", "scored", "padding")
"""Fields of the task that fingerprints always hold; later ones only where they are not at their defaults."""


class _Piece(NamedTuple):
    """A part of a unit in a row: store indices of its tokens and of their targets."""

    part: int
    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    """1 for tokens that count."""


@dataclass(frozen=True, kw_only=True)
class AnswerDataset(TokenDataset):
    """Units of two answers to one prompt; `documents` has the first, `lengths` the tokens of a unit in a row.

    The last token of the common beginning predicts both answers' first tokens, so each answer's part begins with a copy
    of it, and their last tokens, which predict nothing, are left out. Where answers are scored, parts are whole, and
    their last tokens count.
    """

    task: AnswerTask
    prompts: Int[np.ndarray, "units"]
    """Tokens of the common beginning, without its last unless answers are scored."""
    sizes: Int[np.ndarray, "units 2"]
    """Tokens of each answer's part."""
    seconds: Int[np.ndarray, "units"]
    """Store index of the second answer's first token after the common beginning."""
    desirable: Bool[np.ndarray, "units"]
    """True for units whose first answer is good, as in all pairs."""
    first_tokens: Int[np.ndarray, "units"]
    """Counted tokens of the first answer, and of the prompt where it counts."""
    reference: Float32[np.ndarray, "units 2"] | None = None
    """The reference's log-probabilities of the answers, once they are known."""

    PER_DOCUMENT: ClassVar[tuple[str, ...]] = (
        *TokenDataset.PER_DOCUMENT,
        *("prompts", "sizes", "seconds", "desirable", "first_tokens", "reference"),
    )

    @cached_property
    def fingerprint(self) -> str:
        """Hash tokens, masks, selection and layout."""
        digest = hashlib.blake2b(self._tokens_digest.hexdigest().encode(), digest_size=16)
        digest.update(stable_repr(self.task, _DIGESTED).encode())
        for values in (self.prompts, self.sizes, self.seconds, self.desirable):
            digest.update(np.ascontiguousarray(values).data)
        return self._with_columns(digest)

    def segments_of(self, documents: Int[np.ndarray, "units"]) -> Int[np.ndarray, "units"]:
        """Return the segments of units: one of a shared prompt, or two with a copy each."""
        return np.full_like(documents, 1 if self.task.shared_prompt else 2)

    @property
    def document_lengths(self) -> Int[np.ndarray, "lengths"]:
        """Return the lengths of prompts with an answer: attention's work, whether or not prompts are shared."""
        return (self.prompts[:, None] + self.sizes).ravel()

    @property
    def whole_lengths(self) -> Int[np.ndarray, "units"]:
        """Return the tokens of each row's answers with their prompts, before truncation."""
        return self.store.lengths[2 * self.rows] + self.store.lengths[2 * self.rows + 1]

    @property
    def rows(self) -> Int[np.ndarray, "units"]:
        """Return the rows of the data that the units come from."""
        return self.documents // 2

    def indices(self, document: int) -> Int[np.ndarray, "tokens"]:
        """Return the store indices of a prompt, its first and its second answer."""
        size, other = self.sizes[document]
        start, second = self.store.offsets[self.documents[document]], self.seconds[document]
        first = np.arange(start, start + self.prompts[document] + (not self.task.scored) + size)
        return np.concatenate([first, np.arange(second, second + other)])

    def joined(self, others: "Sequence[TokenDataset]") -> dict[str, Any]:
        """Return the fields of the concatenation with data sets of further sources."""
        parts = [self, *others]
        starts = np.cumsum([0, *(len(part.store.tokens) for part in parts)])
        names = ("prompts", "sizes", "desirable", "first_tokens")
        fields = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        seconds = [part.seconds + start for part, start in zip(parts, starts, strict=False)]  # type: ignore[attr-defined]
        return super().joined(others) | fields | {"seconds": np.concatenate(seconds)}

    def build_batch(
        self,
        plan: PackPlan,
        rows: Int[np.ndarray, "B"],
        step: Int[np.ndarray, "documents"],
        *,
        seq_len: int,
        max_segments: int,
        kind: BatchKind | None = None,
    ) -> Batch:
        """Build the batch of these rows of the plan, with a unit in a segment slot; see `TokenDataset.build_batch`."""
        members = [plan.row(row) for row in rows]
        segments = self._segments(members, seq_len, max_segments)
        shape = segments.segment_ids.shape
        tokens, targets = np.zeros((2, *shape), np.int32)
        weights, owners = np.zeros(shape, np.float32), np.full(shape, PARTS * max_segments, np.int32)
        for row, units in enumerate(members):
            pieces = [(slot, piece) for slot, unit in enumerate(units) for piece in self._pieces(unit)]
            if pieces:
                self._fill(pieces, tokens[row], targets[row], weights[row], owners[row])
        answers = self._answers(members, max_segments, owners, step)
        arrays: dict[str, Any] = {"tokens": tokens, "targets": targets, "loss_weights": weights}
        columns = {name: self._by_slot(values, members, max_segments) for name, values in self.columns.items()}
        images = None
        if self.reader is not None:
            parts = [[part for unit in units for part in self._document_parts(unit)] for units in members]
            images = self.reader.rows(tokens, parts, self.most_features(members))
        return Batch(**arrays, segments=segments, answers=answers, columns=columns, images=images)

    def _document_parts(self, unit: int) -> Iterator[DocumentPart]:
        """Yield the parts of a unit by their places in the first document: images are in the prompt alone."""
        assert self.reader is not None
        document, prompt = int(self.documents[unit]), int(self.prompts[unit])
        if self.task.shared_prompt:
            yield self.reader.part(document, 0, prompt, prompt)
        for size in self.sizes[unit].tolist():
            yield self.reader.part(document, prompt if self.task.shared_prompt else 0, prompt + size, prompt)

    def most_features(self, members: Sequence[Int[np.ndarray, "documents"]]) -> int:
        """See `TokenDataset.most_features`; each answer may have a copy of its prompt."""
        return super().most_features(members) * (1 if self.task.shared_prompt else 2)

    def _by_slot(self, values: Float32[np.ndarray, "units"], members: list[np.ndarray], slots: int) -> Any:
        """Return each unit's value in its place in the rows; 0 for unused slots."""
        found = np.zeros((len(members), slots), np.float32)
        for row, units in enumerate(members):
            found[row, : len(units)] = values[units]
        return found

    def _segments(self, members: list[np.ndarray], seq_len: int, slots: int) -> PackedSegments:
        parts = np.concatenate([self.prompts[:, None], self.sizes], axis=1)
        sizes = [[(int(a), int(b), int(c)) for a, b, c in parts[units]] for units in members]
        if self.task.shared_prompt:
            forks = pack_forks(sizes, seq_len=seq_len, max_segments=slots)
            return copy_beginnings(forks) if self.task.copies else forks
        copies = [[prompt + size for prompt, *answers in units for size in answers] for units in sizes]
        return pack_segments(copies, seq_len=seq_len, kind=BatchKind(False, segment_bucket(2 * slots)))

    def _pieces(self, unit: int) -> Iterator[_Piece]:
        """Yield the parts of a unit, as they lie in a row."""
        prompt, chosen, rejected = self._scored_pieces(unit) if self.task.scored else self._predicted_pieces(unit)
        yield prompt
        yield chosen
        if not self.task.shared_prompt:
            yield prompt._replace(weights=np.zeros(len(prompt.tokens)))
        yield rejected

    def _predicted_pieces(self, unit: int) -> tuple[_Piece, _Piece, _Piece]:
        start, prompt, second = self.store.offsets[self.documents[unit]], self.prompts[unit], self.seconds[unit]
        size, other = self.sizes[unit]
        shared = np.arange(start, start + prompt + 1)
        answer, rest = shared[-1] + np.arange(size + 1), second + np.arange(other)
        return (
            _Piece(PROMPT, shared[:-1], shared[1:], np.full(prompt, self.task.prompt_loss)),
            _Piece(CHOSEN, answer[:-1], answer[1:], self.store.mask[answer[1:]] > 0),
            _Piece(REJECTED, np.concatenate([shared[-1:], rest[:-1]]), rest, self.store.mask[rest] > 0),
        )

    def _scored_pieces(self, unit: int) -> tuple[_Piece, _Piece, _Piece]:
        start, prompt = self.store.offsets[self.documents[unit]], self.prompts[unit]
        size, other = self.sizes[unit]
        shared = np.arange(start, start + prompt)
        first, second = start + prompt + np.arange(size), self.seconds[unit] + np.arange(other)
        return (
            _Piece(PROMPT, shared, shared, np.zeros(prompt)),
            _Piece(CHOSEN, first, first, np.arange(size) == size - 1),
            _Piece(REJECTED, second, second, np.arange(other) == other - 1),
        )

    def _fill(self, pieces: list[tuple[int, _Piece]], *arrays: np.ndarray) -> None:
        """Write a row's tokens, targets, weights and owners."""
        tokens, targets, weights, owners = arrays
        sizes = [len(piece.tokens) for _, piece in pieces]
        end, source = sum(sizes), np.concatenate([piece.targets for _, piece in pieces])
        tokens[:end] = self.store.tokens[np.concatenate([piece.tokens for _, piece in pieces])]
        targets[:end] = self.store.tokens[source]
        weights[:end] = np.concatenate([piece.weights for _, piece in pieces])
        owner = np.repeat([PARTS * slot + piece.part for slot, piece in pieces], sizes)
        owners[:end] = np.where(weights[:end] > 0, owner, owners[:end])

    def _answers(self, members: list[np.ndarray], slots: int, owners: np.ndarray, step: np.ndarray) -> Answers:
        shape = len(members), slots
        used, desirable, token_weight = np.zeros((3, *shape), np.float32)
        reference: Any = None if self.reference is None else np.zeros((*shape, 2), np.float32)
        for row, units in enumerate(members):
            used[row, : len(units)], desirable[row, : len(units)] = 1, self.desirable[units]
            if reference is not None and self.reference is not None:
                reference[row, : len(units)] = self.reference[units]
        token_weight[:] = len(step) / max(self.first_tokens[step].sum(), 1)
        arrays: dict[str, Any] = {"owners": owners, "used": used, "desirable": desirable, "token_weight": token_weight}
        return Answers(**arrays, reference=reference)


class _Unit(NamedTuple):
    document: int
    prompt: int
    """Tokens of the common beginning, without its last unless answers are scored."""
    sizes: tuple[int, int]
    second: int
    desirable: bool


@dataclass(frozen=True)
class _Bounds:
    """First and last trained tokens of every document of a store; −1 for documents without."""

    firsts: Int[np.ndarray, "documents"]
    lasts: Int[np.ndarray, "documents"]

    @classmethod
    def of(cls, store: TokenStore) -> "_Bounds":
        trained = np.append(np.flatnonzero(store.mask), len(store.mask))
        starts, ends = store.offsets[:-1], store.offsets[1:]
        first, after = np.searchsorted(trained, starts), np.searchsorted(trained, ends)
        some = after > first
        return cls(
            firsts=np.where(some, trained[first] - starts, -1), lasts=np.where(some, trained[after - 1] - starts, -1)
        )


def select_answers(
    store: TokenStore,
    config: DataConfig,
    source: Source,
    task: AnswerTask,
    columns: Columns = NO_COLUMNS,
    images: ImageRules | None = None,
) -> Selection:
    """Select the units whose answers have target tokens, fitted into a row.

    A store has two documents for every row of the data: a preferred and another answer, one empty where the row has a
    label. An overlong unit loses the ends of its answers, the longer one's first, and is left out where they are then
    equal.

    Raises:
        ValueError: an overlong unit under `overlong='error'`, no unit left, or a value of a column that is no number.
    """
    bounds, seq_len = _Bounds.of(store), config.row_tokens
    candidates = _labeled(store, bounds) if task.labeled else _pairs(store, bounds, task)
    units, truncated = [], 0
    for unit in candidates:
        prompts = unit.prompt * (1 if task.shared_prompt else 2)
        overlong = prompts + sum(unit.sizes) > seq_len
        if overlong and config.overlong == "error":
            raise overlong_error(config, row_origin(source, unit.document // 2), prompts + sum(unit.sizes))
        unit = unit._replace(sizes=_fitted(unit.sizes, seq_len - prompts))
        if not _counts(store, unit, task) or (overlong and (config.overlong == "drop" or _is_equal(store, unit, task))):
            continue
        units.append(unit)
        truncated += overlong
    if not units:
        raise ValueError(
            f"{source}: no answer has a target token beside its prompt within seq_len={seq_len} tokens: raise --seq-len"
        )
    dataset = _dataset(store, units, task)
    reader = ImageReader(rules=images, store=store) if images is not None and store.images is not None else None
    dataset = replace(dataset, columns=read_columns(store, dataset.rows, columns, source), reader=reader)
    return Selection(dataset=dataset, truncated=truncated, dropped=len(store.lengths) // 2 - len(units))


def _pairs(store: TokenStore, bounds: _Bounds, task: AnswerTask) -> Iterator[_Unit]:
    ends = last_tokens(store, (task.padding,)) if task.scored else bounds.lasts + 1
    for first in range(0, len(store.lengths), 2):
        second = first + 1
        begins = min(bounds.firsts[first], bounds.firsts[second])
        if begins < 1:
            continue
        shared = _common(store, first, second, int(begins))
        if shared:
            sizes = (int(ends[first]) - shared, int(ends[second]) - shared)
            yield _Unit(first, shared - (not task.scored), sizes, int(store.offsets[second]) + shared, True)


def _labeled(store: TokenStore, bounds: _Bounds) -> Iterator[_Unit]:
    """Yield every answer beside the previous row's, under its own prompt."""
    documents = np.flatnonzero(bounds.firsts > 0)
    for other, document in zip(np.roll(documents, 1), documents, strict=True):
        shared = int(bounds.firsts[document])
        sizes = (
            int(bounds.lasts[document]) + 1 - shared,
            int(bounds.lasts[other] + 1 - bounds.firsts[other]),
        )
        second = int(store.offsets[other] + bounds.firsts[other])
        yield _Unit(int(document), shared - 1, sizes, second, bool(document % 2 == 0))


def _common(store: TokenStore, first: int, second: int, limit: int) -> int:
    """Return the tokens, up to `limit`, with which two documents both begin."""
    a, b = (store.tokens[start : start + limit] for start in store.offsets[[first, second]])
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else limit


def _counts(store: TokenStore, unit: _Unit, task: AnswerTask) -> bool:
    """Tell whether both answers have target tokens, or a last token to score."""
    if task.scored:
        return min(unit.sizes) > 0
    starts = store.offsets[unit.document] + unit.prompt + 1, unit.second
    return all(_counted(store, start, size) for start, size in zip(starts, unit.sizes, strict=True))


def _is_equal(store: TokenStore, unit: _Unit, task: AnswerTask) -> bool:
    """Tell whether both answers of a pair have the same tokens, as far as the shorter one goes."""
    first, size = store.offsets[unit.document] + unit.prompt + (not task.scored), min(unit.sizes)
    one, other = (store.tokens[start : start + size] for start in (first, unit.second))
    return not task.labeled and np.array_equal(one, other)


def _counted(store: TokenStore, start: int, size: int) -> int:
    return int(store.mask[np.arange(start, start + max(size, 0))].sum())


def _fitted(sizes: tuple[int, int], room: int) -> tuple[int, int]:
    """Shorten two sizes to a sum of `room`, the longer one first."""
    first, second = sizes
    if first + second <= room:
        return sizes
    half = room // 2
    first = min(first, max(half, room - second))
    return first, min(second, room - first)


def _dataset(store: TokenStore, units: list[_Unit], task: AnswerTask) -> AnswerDataset:
    prompts, sizes = np.array([u.prompt for u in units]), np.array([u.sizes for u in units])
    documents = np.array([u.document for u in units])
    answers = store.offsets[documents] + prompts + 1
    counted = [0 if task.scored else _counted(store, *part) for part in zip(answers, sizes[:, 0], strict=True)]
    return AnswerDataset(
        store=store,
        documents=documents,
        lengths=prompts * (1 if task.shared_prompt else 2) + sizes.sum(1),
        targets=np.ones(len(units), np.int64),
        task=task,
        prompts=prompts,
        sizes=sizes,
        seconds=np.array([u.second for u in units]),
        desirable=np.array([u.desirable for u in units]),
        first_tokens=np.array(counted) + (prompts if task.prompt_loss else 0),
    )
