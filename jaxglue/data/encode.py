"""Tokenization of rows with loss masks."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8
from transformers import PreTrainedTokenizerBase

from jaxglue.data.formats import chat_messages, text_fields
from jaxglue.data.readers import Row
from jaxglue.data.template import ChatTemplate, split_at

Pieces = list[tuple[str, bool]]
"""Consecutive (text, trained) parts of a document."""


class Encoded(NamedTuple):
    """Concatenated documents."""

    tokens: Int32[np.ndarray, "N"]
    mask: UInt8[np.ndarray, "N"]
    """1 for tokens to predict."""
    lengths: Int32[np.ndarray, "documents"]


class Encoder:
    """Tokenizer of rows in one format.

    Documents are tokenized in pieces split where the loss mask changes, so that prompts have the same tokens as in
    generation and the mask is exact.

    Raises:
        ValueError: chats without a chat template, texts without an end-of-text token, or a tokenizer that prepends a
            space to each piece (SentencePiece) where pieces are needed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, format: str, loss_on: str):
        self._format, self._loss_on = format, loss_on
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = ChatTemplate(tokenizer) if format in ("messages", "conversations") else None
        self._bos, self._eos = ([], []) if self._template else _text_ends(tokenizer)
        if format != "text" and loss_on != "all" and self._ids(["b"])[0] != [tokenizer.convert_tokens_to_ids("b")]:
            hint = "use --loss-on all, or convert the tokenizer to byte-level BPE"
            raise ValueError(f"the tokenizer prepends a space to texts, so loss masks would be inexact: {hint}")

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Tokenize rows to documents, in order.

        Raises:
            ValueError: an unusable row, with its origin.
        """
        documents = [self._named_pieces(row) for row in rows]
        ids = iter(self._ids([piece for pieces in documents for piece, _ in pieces]))
        parts = [self._wrapped([(next(ids), trained) for _, trained in pieces]) for pieces in documents]
        return Encoded(
            np.fromiter(chain.from_iterable(i for part in parts for i, _ in part), np.int32),
            np.repeat([trained for part in parts for _, trained in part], _lengths(chain(*parts))).astype(np.uint8),
            np.array([sum(len(i) for i, _ in part) for part in parts], np.int32),
        )

    def _ids(self, pieces: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(pieces, add_special_tokens=False)]

    def _named_pieces(self, row: Row) -> Pieces:
        try:
            return self._pieces(row)
        except ValueError as error:
            raise ValueError(f"{row.origin}: {error}") from error

    def _pieces(self, row: Row) -> Pieces:
        if self._template is None:
            *prompt, text = text_fields(row.value, self._format)
            return [*((part, self._loss_on == "all") for part in prompt), (text, True)]
        messages, tools = chat_messages(row.value, self._format)
        if self._loss_on == "all":
            return [(self._template.render(messages, tools), True)]
        return split_at(*self._template.render_with_spans(messages, tools))

    def _wrapped(self, parts: list[tuple[list[int], bool]]) -> list[tuple[list[int], bool]]:
        return [(self._bos, False), *parts, (self._eos, True)]


def _lengths(parts) -> list[int]:
    return [len(ids) for ids, _ in parts]


def _text_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a text."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token, so texts would not end: set eos_token in its config")
    first = tokenizer("b")["input_ids"][:1]
    return ([tokenizer.bos_token_id] if first == [tokenizer.bos_token_id] else []), [tokenizer.eos_token_id]
