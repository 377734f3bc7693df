"""Documents of tokens with a target each, packed into one step whose loss is a sum."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxglue.data.batch import Batch
from jaxglue.data.images import DocumentPart, ImageRules
from jaxglue.data.iterator import Step
from jaxglue.data.packing import plan_packing
from jaxglue.ops.segments import pack_segments, segment_bucket
from jaxglue.training.run import Rows
from jaxglue.vision.rows import PlacedImage, RowImages


class TokenDocument(NamedTuple):
    """Tokens with a target each, and numbers of theirs that a loss reads."""

    tokens: Int[np.ndarray, " T"]
    targets: Int[np.ndarray, " T"]
    columns: Mapping[str, Float[np.ndarray, " T"]]
    ranks: Bool[np.ndarray, " R"] | None = None
    """Ranks of the adapters that it uses, of documents that share rows with those of other models; None for all."""
    images: tuple[PlacedImage, ...] = ()


def check_documents(documents: Sequence[TokenDocument], rows: Rows, vocabulary: int) -> None:
    """Raise ValueError for no document, or one that is longer than a row or holds other than tokens and numbers."""
    if not documents or max(len(each.tokens) for each in documents) > rows.seq_len:
        raise ValueError(f"expected documents of at most {rows.seq_len} tokens, and at least one: raise seq_len")
    for number, document in enumerate(documents, 1):
        _check_document(document, vocabulary, f"document {number}")


def rows_of(documents: Sequence[TokenDocument], rows: Rows) -> int:
    """Return how many rows the documents take, with those that fill up their last micro-batch."""
    lengths = np.array([len(each.tokens) for each in documents])
    return -(-plan_packing(lengths, seq_len=rows.seq_len).rows // rows.batch_size) * rows.batch_size


def pack_documents(
    documents: Sequence[TokenDocument],
    rows: Rows,
    *,
    slots: int,
    vocabulary: int,
    rules: ImageRules | None = None,
) -> tuple[Step, list[tuple[int, int, int]]]:
    """Pack documents into one step whose loss is a sum; return also each one's row, first and last token.

    Args:
        documents: at least one.
        rows: size of a row and of a micro-batch.
        slots: documents that a row has place for, at least; more where a row holds more.
        vocabulary: tokens of the model.
        rules: of images; None for documents without any.

    Raises:
        ValueError: no document, or one that is longer than a row or holds other than tokens and finite numbers.
    """
    size, seq_len = rows.batch_size, rows.seq_len
    check_documents(documents, rows, vocabulary)
    lengths = np.array([len(each.tokens) for each in documents])
    plan = plan_packing(lengths, seq_len=seq_len)
    slots = max(slots, segment_bucket(plan.max_segments))
    count = -(-plan.rows // size)
    members = [plan.row(row) if row < plan.rows else np.zeros(0, np.int64) for row in range(count * size)]
    names = ("", *documents[0].columns)  # the first is of the tokens that count
    arrays: dict[str, Any] = {name: np.zeros((len(members), seq_len), np.float32) for name in names}
    tokens: Any = np.zeros((len(members), seq_len), np.int32)
    targets: Any = np.zeros_like(tokens)
    ranks: Any = None
    if (own_ranks := documents[0].ranks) is not None:
        ranks = np.zeros((*tokens.shape, len(own_ranks)), bool)
    places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(documents)
    for row, own in enumerate(members):
        for document, last in zip(own, np.cumsum(lengths[own]), strict=True):
            each, part = documents[document], slice(last - lengths[document], last)
            places[document] = row, part.start, part.stop
            tokens[row, part], targets[row, part], arrays[""][row, part] = each.tokens, each.targets, 1
            for name, values in each.columns.items():
                arrays[name][row, part] = values
            if ranks is not None:
                ranks[row, part] = each.ranks
    batches, images = [], None
    if rules is not None and any(each.images for each in documents):
        whole = [[documents[number] for number in own.tolist()] for own in members]
        parts = [[DocumentPart(0, len(each.tokens), each.images) for each in row] for row in whole]
        images = rules.rows(tokens, parts)
    for first in range(0, len(members), size):
        part = slice(first, first + size)
        members_of_part = [lengths[each].tolist() for each in members[part]]
        segments = pack_segments(members_of_part, seq_len=seq_len, max_segments=slots)
        batches.append(
            Batch(
                tokens=tokens[part],
                targets=targets[part],
                loss_weights=arrays[""][part],
                segments=segments,
                images=None if images is None else _part(images, part).with_patches(),
                ranks=None if ranks is None else ranks[part],
                columns={name: values[part] for name, values in arrays.items() if name},
            )
        )
    return Step(micro_batches=tuple(batches), tokens=int(lengths.sum()), targets=1.0), places


def _part(images: RowImages, part: slice) -> RowImages:
    positions = None if images.positions is None else images.positions[part]
    return replace(
        images, rows=images.rows[part], index=images.index[part], positions=positions, used=images.used[part]
    )


def _check_document(document: TokenDocument, vocabulary: int, name: str) -> None:
    for what, tokens in (("tokens", document.tokens), ("targets", document.targets)):
        found = np.asarray(tokens)
        if found.shape != (len(document.tokens),) or not len(found):
            raise ValueError(f"{name}: expected tokens, and as many targets, got shape {list(found.shape)} of {what}")
        if len(bad := found[(found < 0) | (found >= vocabulary)]):
            raise ValueError(
                f"{name}: its {what} hold the id {bad[0]}, and the vocabulary has {vocabulary:,}; a target that is not "
                "trained on is any token, with weight 0"
            )
    for column, values in document.columns.items():
        if np.shape(values) != (len(document.tokens),) or not np.isfinite(values).all():
            raise ValueError(f"{name}: {column} must hold a finite number for each of {len(document.tokens)} tokens")
