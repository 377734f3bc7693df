"""Prompts to answer in training, tokenized once, with the columns of their rows for rewards."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.config import DataConfig
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.files import Row
from jaxglue.data.limits import template_time_limit
from jaxglue.data.messages import Chat, listed, read_chat
from jaxglue.data.readers import read_rows
from jaxglue.data.store import StoreInfo, TokenStore
from jaxglue.data.template import ChatTemplate, adopt
from jaxglue.data.tokenizer import require_unicode

Content = str | list[dict[str, Any]]
"""A text to continue, or a conversation to answer."""
_KEYS = ("prompt", "messages", "conversations", "question")


class Prompt(NamedTuple):
    """A row of the data."""

    origin: str
    """File and line."""
    content: Content
    tokens: list[int]
    columns: Mapping[str, Any]
    """The row's other columns."""


@dataclass(frozen=True, kw_only=True)
class PromptDataset(TokenDataset):
    """Prompts as documents without targets."""

    prompts: tuple[Prompt, ...]
    answer: int
    """The most tokens of an answer."""

    @property
    def document_lengths(self) -> Int[np.ndarray, "prompts"]:
        """Return the lengths of prompts with the longest answers, for which memory is planned."""
        return self.lengths + self.answer

    @cached_property
    def fingerprint(self) -> str:
        """Hash tokens and columns."""
        digest = self._tokens_digest
        digest.update(json.dumps([prompt.columns for prompt in self.prompts], sort_keys=True, default=str).encode())
        return digest.hexdigest()


def read_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, answer: int, limit: int) -> PromptDataset:
    """Read rows with a `prompt`, `messages` or a `question`; a text in `prompt` is continued as it is.

    Args:
        config: data sources, system message and template.
        tokenizer: of the model; adopts the template of `config`.
        answer: the most tokens of an answer.
        limit: the most of a prompt and its answer.

    Raises:
        ValueError: no row, one without a prompt, or a prompt that leaves no room for the answer, by file and line.
    """
    adopt(tokenizer, config)
    encoder, prompts = _Encoder(tokenizer, config.system), list[Prompt]()
    for row in (row for source in config.sources for row in read_rows(source)):
        prompt = encoder.encode(row)
        if len(prompt.tokens) + answer <= limit:
            prompts.append(prompt)
        elif config.overlong != "drop":
            raise ValueError(
                f"{row.origin}: a prompt of {len(prompt.tokens):,} tokens leaves no room for an answer of {answer:,} "
                f"in {limit:,}: raise --seq-len, lower --max-completion-length, or leave it out with --overlong drop"
            )
    if not prompts:
        raise ValueError(f"data: {', '.join(config.data)} has no prompt that fits: check the files and --seq-len")
    lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int64)
    tokens = np.concatenate([np.array(prompt.tokens, np.int32) for prompt in prompts])
    info: StoreInfo = {
        "digest": hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest(),
        "max_token": int(tokens.max()),
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    store = TokenStore(tokens=tokens, mask=np.zeros(len(tokens), np.uint8), offsets=offsets, info=info)
    documents: dict[str, Any] = {
        "documents": np.arange(len(prompts)),
        "lengths": lengths,
        "targets": np.zeros_like(lengths),
    }
    return PromptDataset(store=store, **documents, prompts=tuple(prompts), answer=answer)


class _Encoder:
    """Tokenizes prompts as in generation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str):
        self._tokenizer, self._system = tokenizer, system
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    def encode(self, row: Row) -> Prompt:
        try:
            content, chat, columns = self._read(row.value)
            return Prompt(row.origin, content, self._tokens(content, chat), columns)
        except ValueError as error:
            raise ValueError(f"{row.origin}: {error}") from error

    def _read(self, row: dict[str, Any]) -> tuple[Content, Chat | None, dict[str, Any]]:
        key = next((key for key in _KEYS if row.get(key)), None)
        if key is None:
            raise ValueError(f"a prompt needs one of {', '.join(_KEYS)}; the row's keys are {listed(row)}")
        columns = {name: value for name, value in row.items() if name not in (key, "tools", "system")}
        if key == "prompt" and isinstance(row[key], str):
            require_unicode(row[key])
            return row[key], None, columns
        messages = [{"role": "user", "content": row[key]}] if key == "question" else row[key]
        chat = read_chat(messages, row.get("tools"), key)
        if len(chat.messages) > 1 and chat.messages[-1]["role"] == "assistant":  # the answer of supervised data
            chat = Chat(chat.messages[:-1], chat.tools, chat.trained[:-1])
        system = row.get("system") or self._system
        chat = chat.with_system(system) if system else chat
        return chat.messages, chat, columns

    def _tokens(self, content: Content, chat: Chat | None) -> list[int]:
        if chat is None:
            assert isinstance(content, str)
            return self._tokenizer.encode(content)
        if self._template is None:
            raise ValueError("the tokenizer has no chat template: name one with --chat-template, or give texts")
        with template_time_limit():
            text = self._template.render_prompt(*self._template.protect(chat.messages, chat.tools))
        require_unicode(text)
        return self._template.encode(text)


def positions(count: int, seed: int, start: int) -> Iterator[int]:
    """Yield the prompts from position `start` on of an endless order, shuffled in each epoch."""
    epoch, place = divmod(start, count)
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(count)[place:].tolist()
        epoch, place = epoch + 1, 0


class PromptReport:
    """Describes prompts, in place of a `DataReport`."""

    def __init__(self, dataset: PromptDataset):
        self._lengths = dataset.lengths

    def __str__(self) -> str:
        shortest, longest = self._lengths.min(), self._lengths.max()
        return f"{len(self._lengths):,} prompts of {shortest:,} to {longest:,} tokens"
