"""Tokenization of a text in pieces that are tokenized as inside of it: SentencePiece puts a space before texts."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from jaxglue.data.words import WordTokenizer

_TOKEN_BYTES = 4
_PLACES = ("normalizer", "pre_tokenizer")


class PieceTokenizer:
    """Tokenizer of the consecutive pieces of texts.

    Tokenizers such as Llama 2's and Mistral's put a space before a text, and some before each part after a special
    token. A piece gets one where the whole text has it.
    """

    def __init__(self, backend: Tokenizer):
        backend.no_truncation()
        backend.no_padding()
        self._whole = WordTokenizer(backend)
        self._inside: WordTokenizer | None = None
        self.exact = True
        """Pieces are tokenized as inside of their text; if not, the tokenizer adds something unknown to each."""
        if not _adds_text(backend):
            return
        inside = _inside(backend)
        self._inside, self.exact = WordTokenizer(inside), not _adds_text(inside)
        normal = _normalize(backend, "b") == "b"  # else parts that are normalized alone have a space
        added = [t for t in backend.get_added_tokens_decoder().values() if not t.single_word]
        specials = sorted((t for t in added if normal or not t.normalized), key=lambda token: -len(token.content))
        pattern = "|".join(map(_pattern, specials)) or "(?!)"
        self._special, self._special_end = re.compile(pattern), re.compile(rf"(?:{pattern})\Z")

    def __call__(self, texts: Sequence[Sequence[str]]) -> list[list[bytes]]:
        """Return the tokens of each piece of each text, int32, without special tokens around the text."""
        if self._inside is None:
            tokens = iter(self._whole([*chain.from_iterable(texts)]))
        else:
            parts = [*chain.from_iterable(map(self._split, texts))]
            inside, whole = self._inside([p.inside for p in parts]), self._whole([p.before + p.rest for p in parts])
            tokens = iter(
                [i + w[_TOKEN_BYTES * bool(p.before) :] for i, w, p in zip(inside, whole, parts, strict=True)]
            )
        return [[next(tokens) for _ in pieces] for pieces in texts]

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each piece of one text."""
        (found,) = self([pieces])
        return [memoryview(tokens).cast("i").tolist() for tokens in found]

    def _split(self, pieces: Sequence[str]) -> Iterator["_Parts"]:
        last = ""
        for piece in pieces:
            if not last:
                yield _Parts("", "", piece)
            elif found := self._special_end.search(last):
                yield _Parts("", found[0], piece)
            else:
                found = self._special.search(piece)
                end = found.start() if found else len(piece)
                yield _Parts(piece[:end], "", piece[end:])
            last = piece or last


class _Parts(NamedTuple):
    """Parts of a piece."""

    inside: str
    """Its beginning, where that is the middle of a part between special tokens."""
    before: str
    """Special token that ends the piece before."""
    rest: str


def _pattern(token: AddedToken) -> str:
    """Return the pattern of a special token, with the white space around that is lost with it."""
    return rf"{r'\s*' * token.lstrip}{re.escape(token.content)}{r'\s*' * token.rstrip}"


def _adds_text(backend: Tokenizer) -> bool:
    """Tell whether a tokenizer reads a text as another one."""
    text = _normalize(backend, "b")
    parts = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return "".join(part for part, _ in parts) != "b"


def _normalize(backend: Tokenizer, text: str) -> str:
    return text if backend.normalizer is None else str(backend.normalizer.normalize_str(text))


def _inside(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer of the middle of texts."""
    state = _without_space(json.loads(backend.to_str()))
    for token in state["added_tokens"]:
        if token["normalized"]:  # it is found where the normalized text has it
            token["content"] = _normalize(backend, token["content"])
    return Tokenizer.from_str(json.dumps(state))


def _without_space(state: Any) -> Any:
    """Return the state of a tokenizer, or of a part of one, without what puts a space before texts."""
    if not isinstance(state, dict):
        return state
    state = {key: _without_space(part) if key in _PLACES else part for key, part in state.items()}
    for key in ("normalizers", "pretokenizers"):
        if key in state:
            state[key] = [part for part in map(_without_space, state[key]) if part is not None]
    match state.get("type"):
        case "Prepend":
            return None
        case "Metaspace":
            return {**state, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**state, "add_prefix_space": False}
    return state
