"""Statistics and texts of prepared data, to be looked at before training."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.answer_dataset import AnswerDataset
from jaxglue.data.batch import TokenDataset
from jaxglue.data.readers import read_rows
from jaxglue.data.sources import Source


@dataclass(frozen=True, kw_only=True)
class Bin:
    """A bar of the histogram of lengths: documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int


def length_bins(lengths: Int[np.ndarray, "documents"], count: int = 12) -> list[Bin]:
    """Count documents by length in bins of equal width."""
    width = -(-int(lengths.max()) // count)
    counts = np.bincount((lengths - 1) // width, minlength=1)
    return [Bin(low=i * width + 1, high=(i + 1) * width, documents=int(number)) for i, number in enumerate(counts)]


def count_duplicates(data: TokenDataset) -> int:
    """Count documents whose tokens are those of an earlier one."""
    digests = (hashlib.blake2b(_tokens(data, document)[0].tobytes(), digest_size=8) for document in range(len(data)))
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
    pending: list[int] = []
    decode = tokenizer.backend_tokenizer.decode
    for index, (token, trained) in enumerate(zip(tokens.tolist(), mask.tolist(), strict=True)):
        if index == second:
            yield "\n", False
        pending.append(token)
        text = decode(pending, skip_special_tokens=False)
        if not text.endswith("\ufffd") or len(pending) > 4:  # else the token ends inside a character
            yield text, bool(trained)
            pending = []
    if pending:
        yield decode(pending, skip_special_tokens=False), bool(mask[-1])


def _tokens(data: TokenDataset, document: int) -> tuple[np.ndarray, np.ndarray]:
    indices = data.indices(document)
    return data.store.tokens[indices], data.store.mask[indices]


def _origins(rows: set[int], sources: Sequence[Source]) -> dict[int, str]:
    every = (row.origin for source in sources for row in read_rows(source))
    return {number: origin for number, origin in enumerate(every) if number in rows}
