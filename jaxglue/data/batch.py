"""Batches, and the tokenized data set behind them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jaxtyping import Array, Float32, Int, Int32

from jaxglue.data.answers import Answers
from jaxglue.data.packing import PackPlan
from jaxglue.data.store import TokenStore, join_stores
from jaxglue.ops.segments import BatchKind, PackedSegments, pack_segments


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """B packed rows of T tokens."""

    tokens: Int32[Array, "B T"]
    targets: Int32[Array, "B T"]
    """Next token of the same document; 0 at a document's end and in padding."""
    loss_weights: Float32[Array, "B T"]
    """1 for trained targets, 0 elsewhere; sums to the number of target tokens."""
    segments: PackedSegments
    answers: Answers | None = None
    """Units of answers that an objective compares; None in supervised training."""
    sources: Int32[Array, "B T"] | None = None
    """Source of each token, in evaluation on several sources only."""

    def without_lengths(self) -> "Batch":
        """Drop the fields of the segments that differ between attention's kernels, so that batches share programs."""
        unused: Any = None
        return replace(self, segments=replace(self.segments, cu_seqlens=unused, long=False))


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Selected documents of a store, truncated to their lengths."""

    store: TokenStore
    documents: Int[np.ndarray, "documents"]
    """Document indices in the store."""
    lengths: Int[np.ndarray, "documents"]
    """Tokens used of each document, from its start."""
    targets: Int[np.ndarray, "documents"]
    """Target tokens of each document."""
    sources: Int[np.ndarray, "documents"] | None = None
    """Source of each document; None for a single one."""
    passes: tuple[float, ...] = (1.0,)
    """Passes over each source in an epoch."""

    @property
    def document_lengths(self) -> Int[np.ndarray, "lengths"]:
        """Return the lengths of the documents that attention sees."""
        return self.lengths

    @property
    def whole_lengths(self) -> Int[np.ndarray, "documents"]:
        """Return the tokens of the documents before truncation."""
        return self.store.lengths[self.documents]

    @property
    def rows(self) -> Int[np.ndarray, "documents"]:
        """Return the rows of the data that the documents come from."""
        return self.documents

    def indices(self, document: int) -> Int[np.ndarray, "tokens"]:
        """Return the store indices of a document's tokens."""
        start = self.store.offsets[self.documents[document]]
        return np.arange(start, start + self.lengths[document])

    PER_DOCUMENT: ClassVar[tuple[str, ...]] = ("documents", "lengths", "targets", "sources")
    """Fields with a value for each document."""

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, chosen: np.ndarray) -> Self:
        """Return the documents of a mask or of indices."""
        values = {name: getattr(self, name) for name in self.PER_DOCUMENT}
        return replace(self, **{name: value[chosen] for name, value in values.items() if value is not None})

    def joined(self, others: "Sequence[TokenDataset]") -> dict[str, Any]:
        """Return the fields of the concatenation with data sets of further sources."""
        parts = [self, *others]
        firsts = np.cumsum([0, *(len(part.store.lengths) for part in parts)])
        fields = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "targets")}
        return fields | {
            "store": join_stores([part.store for part in parts]),
            "documents": np.concatenate([part.documents + first for part, first in zip(parts, firsts, strict=False)]),
            "sources": np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            "passes": (1.0,) * len(parts),
        }

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
        """Build the batch of these rows of the plan; rows past its end are all padding with weight 0.

        Args:
            plan: packed rows.
            rows: of this process and micro-batch.
            step: documents of the whole step, for normalization.
            seq_len, max_segments, kind: of `pack_segments`.
        """
        members = [plan.row(r) for r in rows]
        lengths = [self.lengths[row] for row in members]
        segments = pack_segments(lengths, seq_len=seq_len, max_segments=max_segments, kind=kind)
        tokens, mask = np.zeros((len(rows), seq_len), np.int32), np.zeros((len(rows), seq_len), np.bool_)
        filled = segments.segment_ids > 0
        source = _source_positions(self, np.concatenate(members), np.asarray(segments.positions)[filled])
        tokens[filled], mask[filled] = self.store.tokens[source], self.store.mask[source]
        targets, weights = np.zeros_like(tokens), np.zeros_like(tokens, np.float32)
        same = (segments.segment_ids[:, 1:] == segments.segment_ids[:, :-1]) & filled[:, 1:]
        targets[:, :-1] = tokens[:, 1:] * same
        weights[:, :-1] = mask[:, 1:] & same
        arrays: dict[str, Any] = {"tokens": tokens, "targets": targets, "loss_weights": weights}
        return Batch(**arrays, segments=segments)

    @cached_property
    def fingerprint(self) -> str:
        """Hash tokens, masks, selection and lengths."""
        digest = hashlib.blake2b(self.store.info["digest"].encode(), digest_size=16)
        digest.update(self.documents.astype(np.int64).data)
        digest.update(self.lengths.astype(np.int64).data)
        if self.sources is not None and set(self.passes) != {1.0}:
            digest.update(self.sources.astype(np.int64).data)
            digest.update(repr(self.passes).encode())
        return digest.hexdigest()


def _source_positions(
    dataset: TokenDataset, members: Int[np.ndarray, "documents"], positions: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """Return the store indices of the member documents' tokens, concatenated."""
    first = dataset.store.offsets[dataset.documents[members]]
    return np.repeat(first, dataset.lengths[members]) + positions
