"""Tokenization of rows with loss masks."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.data.files import Row
from jaxglue.data.formats import (
    ANSWER_KEYS,
    CHATS,
    PAIR_COLUMNS,
    PAIRS,
    WHOLE_CHATS,
    Segments,
    Text,
    read_answers,
    read_numbers,
    read_row,
)
from jaxglue.data.images import ImageRules
from jaxglue.data.limits import memory_limit, template_time_limit
from jaxglue.data.messages import Chat, Messages, Tools, read_weight
from jaxglue.data.pieces import PieceTokenizer
from jaxglue.data.store import TOKEN_BYTES, Encoded
from jaxglue.data.template import NO_TEMPLATE, ChatTemplate, Span, UnmarkedError, plain_pieces, split_at
from jaxglue.data.template_check import TemplateCheck
from jaxglue.data.tokenizer import require_unicode
from jaxglue.vision.records import ImageRecord, ImageRecords

DOUBLED_BOS = ""
"""Finding of a text that begins with the beginning-of-text token, which the tokenizer adds too."""
Pieces = list[tuple[str | bytes, bool]]
"""Consecutive (text or int32 tokens, trained) parts of a document."""


_EMPTY_THINKING = re.compile(r"(?:(?:<think>)?\s*</think>\s*)?")
"""Thinking without content at the start of a turn, which the prompt may have begun; matches always."""


class ChatSplitter:
    """Splitter of chats where their loss mask changes, and inside special tokens that are text; see `Encoder`."""

    def __init__(self, template: ChatTemplate, loss_on: str | None, *, mask_empty_thinking: bool = False):
        self._template, self._all, self._last = template, loss_on == "all", loss_on == "last-turn"
        self._needs_turns = loss_on is not None
        self._mask_empty_thinking = mask_empty_thinking
        self._check = TemplateCheck(template)

    def __call__(self, chat: Chat) -> Iterator[tuple[str, bool]]:
        """Yield (text, trained) pieces, to be tokenized one by one.

        Raises:
            ValueError: an unknown role, a message that the template leaves out, or turns that cannot be told apart.
        """
        messages, tools = self._template.protect(chat.messages, chat.tools)
        split = self._split_whole if self._all else self._split_turns
        pieces = split(messages, tools, chat.trained)
        self._check(messages, tools, "".join(piece for piece, _ in pieces))
        return ((part, trained) for piece, trained in pieces for part in plain_pieces(piece))

    def _split_turns(self, messages: Messages, tools: Tools, trained: Sequence[bool | None]) -> list[tuple[str, bool]]:
        return split_at(*self._trained_spans(messages, tools, trained))

    def _trained_spans(
        self, messages: Messages, tools: Tools, trained: Sequence[bool | None]
    ) -> tuple[str, list[Span]]:
        """Render a chat; return its text and the spans of the assistant's turns that are trained on."""
        turns = [flag for message, flag in zip(messages, trained, strict=True) if message["role"] == "assistant"]
        if any(flag for message, flag in zip(messages, trained, strict=True) if message["role"] != "assistant"):
            raise ValueError("only an assistant's message can have a weight ('weight' or 'train') of its own")
        try:
            text, spans = self._template.render_with_spans(messages, tools)
        except UnmarkedError:
            if self._needs_turns:
                raise
            return self._template.render(messages, tools), []
        if self._mask_empty_thinking:
            spans = [(_EMPTY_THINKING.match(text, start, end).end(), end) for start, end in spans]  # type: ignore[union-attr]
        if self._last and spans:
            return text, spans[-1:] if turns[-1] is not False else []
        if False not in turns:
            return text, spans
        if len(spans) != len(turns):
            raise ValueError(
                f"the chat template marks {len(spans)} spans for {len(turns)} assistant messages, so their weights "
                "cannot be assigned"
            )
        return text, [span for span, flag in zip(spans, turns, strict=True) if flag is not False]

    def _split_whole(self, messages: Messages, tools: Tools, trained: Sequence[bool | None]) -> list[tuple[str, bool]]:
        """Split a chat of which every token is trained on but those of assistant messages with weight 0."""
        if False not in trained:
            return [(self._template.render(messages, tools), True)]
        text, spans = self._trained_spans(messages, tools, [flag is False for flag in trained])
        return [(piece, not inside) for piece, inside in split_at(text, spans)]


class Encoder:
    """Tokenizer of rows in one format.

    Documents are tokenized in pieces split where the loss mask changes, so that prompts have the same tokens as in
    generation and the mask is exact.

    Args:
        tokenizer: of the documents.
        format: of the rows.
        loss_on: tokens with loss; None where the mask is not read: documents without it are tokenized whole.
        system: message of chats that have none.
        columns: numbers of each row, with the values of those that lack them.
        allowed: special tokens that messages may hold.
        mask_empty_thinking: leave it out of the loss.
        images: of models that see.
        remedy: ends the errors about documents whose mask cannot be made.

    Raises:
        ValueError: chats without a chat template, texts without an end-of-text token, or a tokenizer that adds
            something other than a space to each piece, where pieces are needed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        format: str,
        loss_on: str | None,
        system: str = "",
        columns: Columns = NO_COLUMNS,
        allowed: Sequence[str] = (),
        mask_empty_thinking: bool = False,
        images: ImageRules | None = None,
        remedy: str = "",
    ):
        self._images, self._remedy = images, remedy
        self.columns = {**(PAIR_COLUMNS if format == PAIRS else {}), **columns}
        """Columns of numbers that are read beside the documents."""
        self._tokenize = PieceTokenizer(tokenizer.backend_tokenizer)
        if loss_on is None and not self._tokenize.exact:
            loss_on = "all"
        self.format, self._all, self._system = format, loss_on == "all", system
        is_chat = format in CHATS
        chat_loss = "all" if loss_on == "completion" and format in WHOLE_CHATS else loss_on
        template = ChatTemplate(tokenizer, allowed) if is_chat or tokenizer.chat_template else None
        self._template = template
        self._split_chat = (
            ChatSplitter(template, chat_loss, mask_empty_thinking=mask_empty_thinking) if template else None
        )
        self._bos, self._eos = (b"", b"") if is_chat else _text_ends(tokenizer)
        self._ends = str(tokenizer.bos_token), str(tokenizer.eos_token)
        self._findings: Counter[str] = Counter()
        if format != "text" and not self._all and not self._tokenize.exact:
            hint = f"use a tokenizer without that{remedy}"
            raise ValueError(f"the tokenizer's normalizer adds to texts, so loss masks would be inexact: {hint}")

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Tokenize rows to documents, in order.

        Raises:
            ValueError: an unusable row, with its origin.
        """
        self._findings.clear()
        self._records: list[list[ImageRecord]] = []
        with memory_limit():
            documents = [pieces for row in rows for pieces in self._named_documents(row)]
        texts = [[piece for piece, _ in pieces if isinstance(piece, str)] for pieces in documents]
        tokens = chain.from_iterable(self._tokenize(texts))
        parts = [[next(tokens) if isinstance(piece, str) else piece for piece, _ in pieces] for pieces in documents]
        lengths = np.array([len(part) for part in chain(*parts)], np.int64) // TOKEN_BYTES
        trained = np.array([trained for _, trained in chain(*documents)], np.uint8)
        tokens_, mask = np.frombuffer(bytearray().join(chain(*parts)), np.int32), np.repeat(trained, lengths)
        numbers = np.array([*map(self._numbers, rows)], np.float32)
        if self._images is not None and any(self._records):
            mask[np.isin(tokens_, self._images.tokens)] = 0
        return Encoded(
            tokens_,
            mask,
            np.array([sum(map(len, part)) // TOKEN_BYTES for part in parts], np.int32),
            dict(zip(self.columns, np.reshape(numbers, (len(rows), len(self.columns))).T, strict=True)),
            dict(self._findings),
            None if self._images is None else ImageRecords.of(self._records),
        )

    def _numbers(self, row: Row) -> list[float]:
        """Return a row's values of columns."""
        try:
            return read_numbers(row.value, self.columns)
        except ValueError as error:
            raise ValueError(f"{row.origin}: {error}") from error

    def _named_documents(self, row: Row) -> list[Pieces]:
        """Return the documents of a row: one, or two answers, of which a labeled row leaves one empty."""
        try:
            with template_time_limit():
                documents = self._documents(row.value)
            for text, _ in chain(*documents):
                if isinstance(text, str):
                    require_unicode(text)
            return documents
        except UnmarkedError as error:
            raise ValueError(f"{row.origin}: {error}{self._remedy}") from error
        except ValueError as error:
            raise ValueError(f"{row.origin}: {error}") from error

    def _documents(self, row: dict[str, Any]) -> list[Pieces]:
        if self.format in ANSWER_KEYS:
            contents: Sequence[Text | Segments | None] = read_answers(row, self.format, self._images)
        else:
            contents = [read_row(row, self.format, self._images)]
        trained, found = read_weight(row) is not False, set[str]()
        documents = [self._pieces(content, trained, found) if content else self._no_pieces() for content in contents]
        self._findings.update(found)
        return documents

    def _pieces(self, content: Text | Segments, row_trained: bool, found: set[str]) -> Pieces:
        """Return a document's pieces; add to the findings of its row."""
        if isinstance(content, Chat):
            images = [] if self._images is None else self._images.record(content)
            self._records.append(images)
            pieces = self._chat_pieces(content)
            if self._images is not None:
                pieces = self._expanded(pieces, images)
            found |= self._template.split if self._template else set()
        elif isinstance(content, Segments):
            self._records.append([])
            pieces = [*zip(content.texts, [self._all or trained for trained in content.trained], strict=True)]
        else:
            self._records.append([])
            pieces = self._text_pieces(content)
            if self._bos and "".join(content).startswith(self._ends[0]):
                found.add(DOUBLED_BOS)
        return [(piece, trained and row_trained) for piece, trained in pieces]

    def _no_pieces(self) -> Pieces:
        self._records.append([])
        return []

    def _expanded(self, pieces: Pieces, images: Sequence[ImageRecord]) -> Pieces:
        """Return the pieces of a chat with the tokens of its images."""
        assert self._images is not None
        texts = [(text, trained) for text, trained in pieces if isinstance(text, str)]
        return [*self._images.expand(texts, [image.grid for image in images])]

    def _chat_pieces(self, chat: Chat) -> Pieces:
        if self._split_chat is None:
            raise ValueError(NO_TEMPLATE)
        return list(self._split_chat(chat.with_system(self._system) if self._system else chat))

    def _text_pieces(self, texts: list[str]) -> Pieces:
        if self._system:
            raise ValueError("the row is no chat, so it cannot take a system message: leave out 'system'")
        *prompt, text = texts
        end = b"" if text.endswith(self._ends[1]) else self._eos  # one, as in TRL
        return [(self._bos, False), *((part, self._all) for part in prompt), (text, True), (end, True)]


def _token_bytes(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def _text_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bytes, bytes]:
    """Return the tokens before and after a text."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token, so texts would not end: set eos_token in its config")
    begins = tokenizer("b")["input_ids"][:1] == [tokenizer.bos_token_id]
    return (_token_bytes(tokenizer.bos_token_id) if begins else b""), _token_bytes(tokenizer.eos_token_id)
