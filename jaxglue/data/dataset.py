"""Data sets of tokenized documents: selection, truncation, the held-out split, and their batches."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Float32, Int, Shaped

from jaxglue.data.batch import Batch
from jaxglue.data.config import NO_COLUMNS, Columns, DataConfig, Source
from jaxglue.data.images import ImageReader, ImageRules, cut_before_image
from jaxglue.data.packing import PackPlan
from jaxglue.data.readers import read_rows
from jaxglue.data.store import TokenStore, join_stores
from jaxglue.ops.segments import BatchKind, PackedSegments, pack_segments


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Selected documents of a store, truncated to their lengths."""

    store: TokenStore
    documents: Int[np.ndarray, "documents"]
    """Document indices in the store."""
    lengths: Int[np.ndarray, "documents"]
    """Tokens used of each document, from its start, or from those of `starts` on."""
    targets: Int[np.ndarray, "documents"]
    """Target tokens of each document."""
    sources: Int[np.ndarray, "documents"] | None = None
    """Source of each document; None for a single one."""
    passes: tuple[float, ...] = (1.0,)
    """Passes over each source in an epoch."""
    columns: Mapping[str, Float32[np.ndarray, "documents"]] = field(default_factory=dict)
    """Columns of the documents' rows that an objective reads."""
    reader: ImageReader | None = None
    """Reads the documents' images; None of data without any."""
    starts: Int[np.ndarray, "documents"] | None = None
    """First token of each within its document of the store, where documents are pieces; None for 0."""

    def segments_of(self, documents: Int[np.ndarray, "documents"]) -> Int[np.ndarray, "documents"]:
        """Return the segments of documents in a row."""
        return np.ones_like(documents)

    @property
    def document_lengths(self) -> Int[np.ndarray, "lengths"]:
        """Return the lengths of the documents that attention sees."""
        return self.lengths

    @property
    def whole_lengths(self) -> Int[np.ndarray, "documents"]:
        """Return the tokens of the documents before truncation."""
        return self.store.lengths[self.documents] if self.starts is None else self.lengths

    @property
    def rows(self) -> Int[np.ndarray, "documents"]:
        """Return the rows of the data that the documents come from."""
        return self.documents

    def indices(self, document: int) -> Int[np.ndarray, "tokens"]:
        """Return the store indices of a document's tokens."""
        start = self.store.offsets[self.documents[document]] + (0 if self.starts is None else self.starts[document])
        return np.arange(start, start + self.lengths[document])

    PER_DOCUMENT: ClassVar[tuple[str, ...]] = ("documents", "lengths", "targets", "sources", "starts")
    """Fields with a value for each document."""

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, chosen: np.ndarray) -> Self:
        """Return the documents of a mask or of indices."""
        values = {name: getattr(self, name) for name in self.PER_DOCUMENT}
        given = {name: value[chosen] for name, value in values.items() if value is not None}
        return replace(self, **given, columns={name: value[chosen] for name, value in self.columns.items()})

    def joined(self, others: "Sequence[TokenDataset]") -> dict[str, Any]:
        """Return the fields of the concatenation with data sets of further sources."""
        parts = [self, *others]
        firsts = np.cumsum([0, *(len(part.store.lengths) for part in parts)])
        store = join_stores([part.store for part in parts])
        fields = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "targets")}
        return fields | {
            "store": store,
            "documents": np.concatenate([part.documents + first for part, first in zip(parts, firsts, strict=False)]),
            "sources": np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            "starts": _joined_starts(parts),
            "passes": (1.0,) * len(parts),
            "columns": {name: np.concatenate([part.columns[name] for part in parts]) for name in self.columns},
            "reader": _joined_reader(parts, store),
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
        images = None
        if self.reader is not None:
            ends = [[(int(self.documents[d]), int(self.lengths[d])) for d in row] for row in members]
            parts = [[self.reader.part(document, 0, end, end) for document, end in row] for row in ends]
            images = self.reader.rows(tokens, parts, self.most_features(members))
        columns = self._columns_of_tokens(segments, members)
        return Batch(**arrays, segments=segments, columns=columns, images=images)

    def most_features(self, members: Sequence[Int[np.ndarray, "documents"]]) -> int:
        """Return the features of images in the row of documents that has most of them; 0 for texts."""
        if self.reader is None:
            return 0
        counts = self.reader.counts[self.documents]
        return max((int(counts[row].sum()) for row in members), default=0)

    def _columns_of_tokens(self, segments: PackedSegments, members: list[np.ndarray]) -> dict[str, Any]:
        """Return each token's values of the columns, 0 in padding."""
        return {
            name: token_values(np.asarray(segments.segment_ids), [values[row] for row in members]).astype(np.float32)
            for name, values in self.columns.items()
        }

    @cached_property
    def fingerprint(self) -> str:
        """Hash tokens, masks, selection, lengths and columns."""
        return self._with_columns(self._tokens_digest)

    @property
    def _tokens_digest(self) -> "hashlib.blake2b":
        digest = hashlib.blake2b(self.store.info["digest"].encode(), digest_size=16)
        digest.update(self.documents.astype(np.int64).data)
        digest.update(self.lengths.astype(np.int64).data)
        if self.starts is not None:
            digest.update(self.starts.astype(np.int64).data)
        if self.sources is not None and set(self.passes) != {1.0}:
            digest.update(self.sources.astype(np.int64).data)
            digest.update(repr(self.passes).encode())
        return digest

    def _with_columns(self, digest: "hashlib.blake2b") -> str:
        for name in sorted(self.columns):
            digest.update(np.ascontiguousarray(self.columns[name]).data)
        return digest.hexdigest()


def _joined_reader(parts: "Sequence[TokenDataset]", store: TokenStore) -> ImageReader | None:
    reader = next((part.reader for part in parts if part.reader is not None), None)
    return None if reader is None else replace(reader, store=store)


def _joined_starts(parts: "Sequence[TokenDataset]") -> Int[np.ndarray, "documents"] | None:
    if all(part.starts is None for part in parts):
        return None
    return np.concatenate([np.zeros(len(part), np.int64) if part.starts is None else part.starts for part in parts])


def _source_positions(
    dataset: TokenDataset, members: Int[np.ndarray, "documents"], positions: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """Return the store indices of the member documents' tokens, concatenated."""
    first = dataset.store.offsets[dataset.documents[members]]
    first = first if dataset.starts is None else first + dataset.starts[members]
    return np.repeat(first, dataset.lengths[members]) + positions


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selected documents with truncation and drop counts."""

    dataset: TokenDataset
    truncated: int
    """Documents truncated to `seq_len` tokens."""
    dropped: int
    """Documents omitted as overlong or without target tokens."""


def select_documents(
    store: TokenStore,
    config: DataConfig,
    source: Source,
    columns: Columns = NO_COLUMNS,
    images: ImageRules | None = None,
) -> Selection:
    """Select the documents with target tokens, fitted into a row.

    Raises:
        ValueError: a document above `seq_len` under `overlong='error'`, no document left, or a column's value that is
            no number.
    """
    overlong, treatment = np.flatnonzero(store.lengths > config.row_tokens), config.overlong_of(source)
    if len(overlong) and treatment == "error":
        row = int(overlong[0])
        raise overlong_error(config, row_origin(source, row), int(store.lengths[row]))
    if len(overlong) and treatment == "split":
        return _select_pieces(store, config, source, columns)
    lengths = within_row(store, store.lengths, config.row_tokens, images)
    targets = store.targets_within(store.offsets[:-1] + lengths)
    keep = targets > 0
    if treatment == "drop":
        keep[overlong] = False
    if not keep.any():
        raise _nothing_left(store, config, source, len(overlong))
    documents = np.flatnonzero(keep)
    return Selection(
        dataset=TokenDataset(
            store=store,
            documents=documents,
            lengths=lengths[documents],
            targets=targets[documents],
            columns=read_columns(store, documents, columns, source),
            reader=ImageReader(rules=images, store=store) if images and store.images else None,
        ),
        truncated=int(keep[overlong].sum()),
        dropped=len(keep) - len(documents),
    )


def _select_pieces(store: TokenStore, config: DataConfig, source: Source, columns: Columns) -> Selection:
    """Select pieces of the documents, each as long as a row but for their last ones."""
    if store.images is not None:
        raise ValueError(f"{source}: rows have images, and --overlong split cuts texts: choose truncate or drop")
    row = config.row_tokens
    counts = np.maximum(-(-store.lengths // row), 1)
    documents = np.repeat(np.arange(len(counts)), counts)
    starts = row * (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts))
    first = store.offsets[documents] + starts
    pieces = replace(store, offsets=np.append(first, store.offsets[-1]))
    targets = pieces.targets_within(pieces.offsets[1:])
    keep = np.flatnonzero(targets > 0)
    if not len(keep):
        raise _nothing_left(store, config, source, 0)
    dataset = TokenDataset(
        store=store,
        documents=documents[keep],
        lengths=pieces.lengths[keep],
        targets=targets[keep],
        columns=read_columns(store, documents[keep], columns, source),
        starts=starts[keep],
    )
    return Selection(dataset=dataset, truncated=0, dropped=len(documents) - len(keep))


def within_row(
    store: TokenStore, lengths: Int[np.ndarray, "documents"], row: int, images: ImageRules | None
) -> Int[np.ndarray, "documents"]:
    """Return the tokens of documents that fit into a row; an image is whole, or left out."""
    fitted = np.minimum(lengths, row)
    if images is not None and store.images is not None:
        for document in np.flatnonzero(lengths > row).tolist():
            tokens = store.tokens[np.arange(*store.offsets[[document, document + 1]])]
            fitted[document] = cut_before_image(tokens, int(fitted[document]), store.images, document, images)
    return fitted


def read_columns(
    store: TokenStore, rows: Int[np.ndarray, "documents"], columns: Columns, source: Source
) -> dict[str, Float32[np.ndarray, "documents"]]:
    """Return the rows' values of columns.

    Raises:
        ValueError: a value that is no number.
    """
    found = {}
    for name, absent in columns.items():
        values = store.columns.get(name)
        found[name] = np.full(len(rows), absent, np.float32) if values is None else values[rows]
        if len(bad := np.flatnonzero(~np.isfinite(found[name]))):
            origin = row_origin(source, int(rows[bad[0]]))
            remedy = "mend it, or leave out the column"
            if math.isnan(absent):
                column, listed, _ = name.rpartition(".")
                remedy = (
                    f"every row needs a list of numbers in {column!r}"
                    if listed
                    else "every row needs one, also in place of a name"
                )
            raise ValueError(f"{origin}: {name!r} must be a finite number: {remedy}")
    return found


def token_values(
    segment_ids: Int[np.ndarray, "B T"], values: Sequence[Shaped[np.ndarray, "documents"]]
) -> Shaped[np.ndarray, "B T"]:
    """Return each token's value, 0 for padding, from the values of each row's documents."""
    return np.stack([np.concatenate([[0], own])[ids] for ids, own in zip(segment_ids, values, strict=True)])


def join_selections(selections: Sequence[Selection]) -> Selection:
    """Concatenate the documents of several sources."""
    if len(selections) == 1:
        return selections[0]
    first, *others = (selection.dataset for selection in selections)
    return Selection(
        dataset=replace(first, **first.joined(others)),
        truncated=sum(selection.truncated for selection in selections),
        dropped=sum(selection.dropped for selection in selections),
    )


def hold_out(selection: Selection, config: DataConfig) -> tuple[Selection, Selection]:
    """Hold out a random `eval_fraction` of the documents, or that many of them, preserving their order.

    Pieces of a document are held out together.

    Raises:
        ValueError: either part would be empty.
    """
    rows = np.arange(len(selection.dataset))
    if selection.dataset.starts is not None:
        rows = np.unique(selection.dataset.documents, return_inverse=True)[1]
    total = int(rows[-1]) + 1
    share = config.eval_fraction
    count = round(total * share) if share < 1 else round(share)
    if not 0 < count < total:
        held = "no document would be held out" if count == 0 else "no document would be left to train on"
        raise ValueError(f"eval_fraction={share:g} of {total} documents: {held}; change it or use eval_data")
    is_eval = np.zeros(total, np.bool_)
    is_eval[np.random.default_rng(config.seed).permutation(total)[:count]] = True
    return _part(selection, ~is_eval[rows]), _part(selection, is_eval[rows])


def _part(selection: Selection, chosen: np.ndarray) -> Selection:
    return Selection(dataset=selection.dataset.select(chosen), truncated=0, dropped=0)


def row_origin(source: Source, row: int) -> str:
    """Return the origin of a source's row."""
    return next(islice(read_rows(source), row, None)).origin


def overlong_error(config: DataConfig, origin: str, tokens: int) -> ValueError:
    """Return the error for a row of more tokens than `seq_len`."""
    return ValueError(
        f"{origin}: {tokens} tokens, but seq_len={config.row_tokens}: raise --seq-len, shorten the row, "
        "or choose --overlong truncate or drop"
    )


def _nothing_left(store: TokenStore, config: DataConfig, source: Source, overlong: int) -> ValueError:
    if overlong:
        return ValueError(
            f"{source}: no document has a target token within seq_len={config.row_tokens} tokens "
            f"({overlong} of {len(store.lengths)} are longer): raise --seq-len"
        )
    return ValueError(
        f"{source}: the loss mask leaves no token to train on in any row: check the rows, or use --loss-on all"
    )
