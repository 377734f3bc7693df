"""Tokenization of texts word by word, each distinct word once."""

import json
import re
from array import array
from collections.abc import Collection, Sequence
from itertools import batched, chain, filterfalse
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC

_SPACE, _CUT = re.compile(r"\s"), re.compile(r"(?<=\S)(?= )")
_IRREGULAR = re.compile(r"\0|\s ")
_LONGEST, _MOST = 64, 2**17
"""Characters of a remembered word, and remembered words: 40 MB."""
_TRIAL = 2**16
"""Words learned before texts of mostly new ones are read whole: a word by itself takes three times as long."""
_BATCH = 64
"""Texts in a call of the tokenizer: their encodings stay in the CPU's cache, a fifth faster than thousands."""
_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_BEFORE, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"{_BEFORE}{_UPPER}*{_LOWER}+", rf"{_BEFORE}{_UPPER}+{_LOWER}*")
_ALTERNATIVES = (
    *(_ENDINGS, f"(?i:{_ENDINGS})"),
    *(r" ?\p{L}+", rf"{_BEFORE}\p{{L}}+", rf"{_BEFORE}[\p{{L}}\p{{M}}]+"),
    *(*_CASED, *(f"{letters}(?i:{_ENDINGS})?" for letters in _CASED)),
    *(r" ?\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+"),
)
"""Alternatives of GPT-2's, Llama 3's, Qwen's, GPT-4o's and Mistral's patterns: none matches a space after another
character, or looks further than a character."""
_WORDS = re.compile(rf"(?:(?:{'|'.join(map(re.escape, _ALTERNATIVES))})\|)+")
_SPACES = r"\s+(?!\S)|\s+"
"""Last alternatives of these patterns."""


class WordTokenizer:
    """Tokenizer of texts that remembers the tokens of words; tokenizers that look beyond words read whole texts."""

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._by_words = reads_words_alone(backend)
        self._known: dict[str, bytes] = {}
        self._learned = 0

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        """Return the tokens of each text, int32, without special tokens around it."""
        if not self._by_words:
            return self._encode(texts)
        words = [split_words(text) for text in texts]
        new = list(set(filterfalse(self._known.__contains__, chain.from_iterable(words))))
        if self._learned + len(new) > _TRIAL and 2 * len(new) > sum(map(len, words)):
            return self._encode(texts)
        self._learned += len(new)
        self._known.update(zip(new, self._encode(new), strict=True))
        tokens = [b"".join(map(self._known.__getitem__, some)) for some in words]
        self._forget(new)
        return tokens

    def _forget(self, new: Sequence[str]) -> None:
        for word in new:
            if len(word) > _LONGEST:
                del self._known[word]
        if len(self._known) > _MOST:
            self._known.clear()

    def _encode(self, texts: Collection[str]) -> list[bytes]:
        groups = (self._backend.encode_batch_fast([*some], add_special_tokens=False) for some in batched(texts, _BATCH))
        return [array("i", encoding.ids).tobytes() for group in groups for encoding in group]


def split_words(text: str) -> list[str]:
    """Split a text before each space that follows a character other than white space."""
    return _CUT.split(text) if _IRREGULAR.search(text) else text.replace(" ", "\0 ").split("\0")


def reads_words_alone(tokenizer: Tokenizer) -> bool:
    """Return whether a text's tokens are those of its words, one by one: byte-level BPE with a known pattern."""
    return (
        isinstance(tokenizer.model, BPE)
        and not tokenizer.model.dropout
        and (tokenizer.normalizer is None or isinstance(tokenizer.normalizer, NFC))
        and tokenizer.pre_tokenizer is not None
        and _splits_at_spaces(json.loads(tokenizer.pre_tokenizer.__getstate__()))
        and not any(t.rstrip or _SPACE.search(t.content) for t in tokenizer.get_added_tokens_decoder().values())
    )


def _splits_at_spaces(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether every space after another character begins a match of the pre-tokenizer's pattern."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern.endswith(_SPACES) and bool(_WORDS.fullmatch(pattern.removesuffix(_SPACES)))
    return False
