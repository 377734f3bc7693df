"""Units of two answers to a prompt, selected from a store of documents, and their packed batches."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from jaxglue.config import stable_repr
from jaxglue.data.answer_task import AnswerTask
from jaxglue.data.answers import CHOSEN, PARTS, PROMPT, REJECTED, Answers
from jaxglue.data.batch import Batch, TokenDataset
from jaxglue.data.packing import PackPlan
from jaxglue.ops.segments import BatchKind, PackedSegments, pack_forks, pack_segments, segment_bucket

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
    margins: Float32[np.ndarray, "units"] | None = None
    """Least differences of the answers' scores, where they are scored."""

    PER_DOCUMENT: ClassVar[tuple[str, ...]] = (
        *TokenDataset.PER_DOCUMENT,
        *("prompts", "sizes", "seconds", "desirable", "first_tokens", "reference", "margins"),
    )

    @cached_property
    def fingerprint(self) -> str:
        """Hash tokens, masks, selection and layout."""
        digest = hashlib.blake2b(super().fingerprint.encode(), digest_size=16)
        digest.update(stable_repr(self.task, _DIGESTED).encode())
        for values in (self.prompts, self.sizes, self.seconds, self.desirable):
            digest.update(np.ascontiguousarray(values).data)
        if self.margins is not None:
            digest.update(np.ascontiguousarray(self.margins).data)
        return digest.hexdigest()

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
        names = ("prompts", "sizes", "desirable", "first_tokens", *(("margins",) if self.task.scored else ()))
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
        return Batch(**arrays, segments=segments, answers=answers)

    def _segments(self, members: list[np.ndarray], seq_len: int, slots: int) -> PackedSegments:
        parts = np.concatenate([self.prompts[:, None], self.sizes], axis=1)
        sizes = [[(int(a), int(b), int(c)) for a, b, c in parts[units]] for units in members]
        if self.task.shared_prompt:
            return pack_forks(sizes, seq_len=seq_len, max_segments=slots)
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

    def _fill(self, pieces: list[tuple[int, _Piece]], tokens, targets, weights, owners) -> None:
        """Write a row's tokens, targets, weights and owners."""
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
        margin: Any = None if self.margins is None else np.zeros(shape, np.float32)
        for row, units in enumerate(members):
            used[row, : len(units)], desirable[row, : len(units)] = 1, self.desirable[units]
            if reference is not None and self.reference is not None:
                reference[row, : len(units)] = self.reference[units]
            if margin is not None and self.margins is not None:
                margin[row, : len(units)] = self.margins[units]
        token_weight[:] = len(step) / max(self.first_tokens[step].sum(), 1)
        arrays: dict[str, Any] = {"owners": owners, "used": used, "desirable": desirable, "token_weight": token_weight}
        return Answers(**arrays, reference=reference, margin=margin)
