"""Texts of answers: tokens decoded as they come, up to the texts at which answers end."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxglue.data.decoding import TokenDecoder

CHANNEL = "<|channel|>"
"""Token before a channel's name in the harmony format."""


class Tags(NamedTuple):
    """Texts around the thinking of an answer."""

    begin: str
    end: str


TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"), Tags("<|channel>thought\n", "<channel|>"))
"""Tags around thinking: of Qwen, DeepSeek, GLM and others; of Mistral; of Gemma 4."""
_SHOWN = {"<|channel>", *(tag for tags in TAGS for tag in tags)}
"""Special tokens that are shown: they separate thinking from the answer."""


class AddedTokens:
    """Ids of a tokenizer's added tokens by their texts, which takes a while to list."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        added = tokenizer.added_tokens_decoder.items()
        self.all = {token.content: id for id, token in added}
        self.special = {token.content: id for id, token in added if token.special}


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> AddedTokens:
    """Return the added tokens, listed once."""
    return _added_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=16)
def _added_tokens(tokenizer: PreTrainedTokenizerBase, _: int) -> AddedTokens:
    return AddedTokens(tokenizer)


def special_stops(tokenizer: PreTrainedTokenizerBase, ends: Collection[str]) -> frozenset[int]:
    """Return the special tokens among texts at which answers end: they are no part of an answer's text."""
    tokens = added_tokens(tokenizer).special if ends else {}
    return frozenset(id for text, id in tokens.items() if text in ends)


def before(pieces: Iterable[str], ends: Sequence[str]) -> Iterator[str]:
    """Yield a text in pieces up to the first of `ends`; what may begin one of these waits for the next piece."""
    held = ""
    for piece in pieces:
        shown, held, stopped = cut(held + piece, ends)
        if shown:
            yield shown
        if stopped:
            return
    if held:
        yield held


def cut(text: str, ends: Sequence[str]) -> tuple[str, str, bool]:
    """Return a text before the first of `ends`, what after it may begin one of these, and whether one was in it."""
    if not ends:
        return text, "", False
    if stops := [text.find(end) for end in ends if end in text]:
        return text[: min(stops)], "", True
    start, firsts = max(len(text) - max(map(len, ends)) + 1, 0), {end[0] for end in ends}
    while start < len(text) and not (text[start] in firsts and any(end.startswith(text[start:]) for end in ends)):
        start += 1
    return text[:start], text[start:], False


def without(tokens: Iterable[int], stops: Collection[int]) -> list[int]:
    """Return an answer's tokens without those that end it."""
    return [int(token) for token in tokens if token not in stops]


def in_order(tokenizer: PreTrainedTokenizerBase, answers: Iterable[tuple[int, list[int]]]) -> Iterator[str]:
    """Yield the text of numbered answers in the order of their numbers."""
    waiting, following = dict[int, str](), 0
    for number, tokens in answers:
        waiting[number] = decode(tokenizer, tokens)
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> str:
    """Return the text of `stream_text` at once."""
    return "".join(stream_text(tokenizer, tokens))


def stream_text(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> Iterator[str]:
    """Yield decoded text token by token; a character still incomplete at the end is shown as U+FFFD.

    Special tokens are skipped but those that separate thinking from the answer; with channels (GPT-OSS) none is.
    """
    hidden = _hidden(tokenizer)
    stream = TokenDecoder(tokenizer.backend_tokenizer)
    for token in tokens:
        if token not in hidden and (piece := stream.add(token)):
            yield piece
    if rest := stream.rest():
        yield rest


def _hidden(tokenizer: PreTrainedTokenizerBase, shown: Collection[str] = ()) -> frozenset[int]:
    """Return the special tokens that are no text."""
    added = added_tokens(tokenizer)
    if CHANNEL in added.all:
        return frozenset()
    return frozenset(id for text, id in added.special.items() if text not in _SHOWN and text not in shown)


class TextStream:
    """Text of an answer whose tokens come one by one, up to the first of some texts.

    Special tokens are skipped as in `stream_text`, unless they are among those `shown`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[str], *, shown: Collection[str] = ()):
        self._decoder = TokenDecoder(tokenizer.backend_tokenizer)
        self._hidden, self._ends, self._held = _hidden(tokenizer, shown), ends, ""
        self.text = ""
        """Text certain to be shown."""
        self.stop_text: str | None = None
        """The one of the texts that came."""

    @property
    def stopped(self) -> bool:
        """Return whether one of the texts came."""
        return self.stop_text is not None

    def add(self, token: int) -> None:
        """Add a token's text."""
        if not self.stopped and token not in self._hidden:
            self._take(self._decoder.add(token))

    def end(self) -> None:
        """Add the text that waited for further tokens."""
        if not self.stopped:
            self._take(self._decoder.rest())
        if not self.stopped:
            self.text, self._held = self.text + self._held, ""

    def _take(self, piece: str) -> None:
        held = self._held + piece
        shown, self._held, stopped = cut(held, self._ends)
        if stopped:
            self.stop_text = next(end for end in self._ends if held.startswith(end, len(shown)))
        self.text += shown
