"""Statistics and texts of prepared data, for a report and to be looked at before training."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.answers import AnswerDataset
from jaxglue.data.config import LossOn, Source
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.decoding import TokenDecoder
from jaxglue.data.formats import WHOLE_CHATS
from jaxglue.data.packing import PackPlan
from jaxglue.data.readers import read_rows
from jaxglue.vision.clips import FRAMES_PER_SECOND

_BYTES = 4
"""Longest character in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Sizes of an epoch of the training or the held-out documents."""

    documents: int
    tokens: int
    target_tokens: int
    """Tokens with loss."""
    packed_rows: int
    """Rows of `seq_len` tokens in the first epoch; other epochs may differ by a few."""
    efficiency: float
    """Fraction of the packed rows holding tokens, 0 to 1."""

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.target_tokens:,} targets) "
            f"in {self.packed_rows:,} packed rows, {self.efficiency:.1%} full"
        )


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """A source's part of the training data."""

    name: str
    format: str
    documents: int
    passes: float
    """Passes over the documents in an epoch."""
    share: float
    """Share of the first epoch's tokens, 0 to 1."""

    def __str__(self) -> str:
        return f"{self.share:.1%} {self.name}: {self.documents:,} {self.format} documents, {self.passes:.3g} × an epoch"


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Statistics of the data; `rows`, `truncated` and `dropped` include held-out data."""

    format: str
    cached: bool
    """Tokens come from the cache."""
    rows: int
    """Rows read."""
    truncated: int
    """Documents truncated to `seq_len` tokens."""
    dropped: int
    """Documents omitted as overlong or without target tokens."""
    train: SplitReport
    eval: SplitReport | None
    sources: tuple[SourceReport, ...]
    """Reports of the training data's sources."""
    notes: tuple[str, ...] = ()
    """Probable mistakes, such as a file given twice or columns that are not used."""

    def __str__(self) -> str:
        read = f"{self.rows:,} rows of format {self.format}" + " (tokens from the cache)" * self.cached
        lines = [f"{read}, {self.truncated:,} truncated, {self.dropped:,} dropped", f"train: {self.train}"]
        lines += [f"eval: {self.eval}"] * bool(self.eval)
        lines += [f"  {source}" for source in self.sources if len(self.sources) > 1 or source.passes != 1]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def trained_tokens(format: str, loss_on: LossOn) -> str:
    """Return in words which tokens of rows are trained on."""
    if loss_on == "all" or format == "text" or (loss_on == "completion" and format in WHOLE_CHATS):
        return "every token"
    if format in WHOLE_CHATS:
        return "the assistant's last turn" if loss_on == "last-turn" else "the assistant's turns"
    return "segments with a label" if format == "segments" else "completions"


def split_report(dataset: TokenDataset, plan: PackPlan, seq_len: int) -> SplitReport:
    """Return the sizes of the documents of a plan."""
    tokens = int(dataset.lengths[plan.documents].sum())
    return SplitReport(
        documents=len(plan.documents),
        tokens=tokens,
        target_tokens=int(dataset.targets[plan.documents].sum()),
        packed_rows=plan.rows,
        efficiency=tokens / (plan.rows * seq_len) if plan.rows else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Bin:
    """A bar of the histogram of lengths: documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int


def length_bins(lengths: Int[np.ndarray, "documents"]) -> list[Bin]:
    """Count documents by length in twelve bins of equal width."""
    width = -(-int(lengths.max()) // 12)
    counts = np.bincount((lengths - 1) // width, minlength=1)
    return [Bin(low=i * width + 1, high=(i + 1) * width, documents=int(number)) for i, number in enumerate(counts)]


def count_duplicates(data: TokenDataset) -> int:
    """Count documents whose tokens, and images, are those of an earlier one."""
    digests = (hashlib.blake2b(_content(data, document), digest_size=8) for document in range(len(data)))
    numbers = np.fromiter((int.from_bytes(digest.digest()) for digest in digests), np.uint64, len(data))
    return len(data) - len(np.unique(numbers))


def longest(data: TokenDataset, sources: Sequence[Source], count: int) -> list[tuple[int, str]]:
    """Return (tokens before truncation, origin) of the longest documents, the longest first."""
    lengths = data.whole_lengths
    order = np.argsort(-lengths, kind="stable")[:count]
    rows = data.rows[order].tolist()
    origins = _origins(set(rows), sources)
    return [(int(lengths[d]), origins[row]) for d, row in zip(order, rows, strict=True)]


def trained_parts(data: TokenDataset, document: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Yield the tokens of a document one by one, decoded, and whether each is trained on; a pair's answers in lines."""
    tokens, mask = _tokens(data, document)
    second = len(tokens) - data.sizes[document, 1] if isinstance(data, AnswerDataset) else None
    decoder, images = TokenDecoder(tokenizer.backend_tokenizer), _image_texts(data, document)
    for index, (token, trained) in enumerate(zip(tokens.tolist(), mask.tolist(), strict=True)):
        if index == second:
            yield "\n", False
        if index in images:
            yield images[index], False
            continue
        text = decoder.add(token)
        if text := text or (decoder.rest() if decoder.waiting > _BYTES else ""):  # no character has more tokens
            yield text, bool(trained)
    if text := decoder.rest():
        yield text, bool(mask[-1])


def _image_texts(data: TokenDataset, document: int) -> dict[int, str]:
    """Return texts in place of the tokens of images' features: sizes and tokens with the first, nothing with others."""
    if data.reader is None:
        return {}
    tokens, processor = _tokens(data, document)[0], data.reader.rules.processor
    texts = dict.fromkeys(np.flatnonzero(data.reader.rules.are_features(tokens)).tolist(), "")
    for first, image in data.reader.placed(int(data.documents[document]), tokens):
        if image.grid.is_clip:
            seconds, count = image.grid.rows / FRAMES_PER_SECOND, processor.tokens(image.grid)
            texts[first] = f"⟨clip of {seconds:.1f} seconds, {count} tokens⟩"
            continue
        height, width = image.grid.rows * processor.patch, image.grid.columns * processor.patch
        texts[first] = f"⟨image of {width} × {height} pixels, {processor.tokens(image.grid)} tokens⟩"
    return texts


def _content(data: TokenDataset, document: int) -> bytes:
    content = _tokens(data, document)[0].tobytes()
    if data.reader is None or data.store.images is None:
        return content
    images = data.store.images.of_document(int(data.documents[document]))
    return content + data.store.images.digests[images.start : images.stop].tobytes()


def _tokens(data: TokenDataset, document: int) -> tuple[np.ndarray, np.ndarray]:
    indices = data.indices(document)
    return data.store.tokens[indices], data.store.mask[indices]


def _origins(rows: set[int], sources: Sequence[Source]) -> dict[int, str]:
    every = (row.origin for source in sources for row in read_rows(source))
    return {number: origin for number, origin in enumerate(every) if number in rows}
