"""Answers held to a grammar: what the engine asks of one, and those that llguidance makes of schemas and expressions.

A window of steps runs without the host, so tokens are sampled freely, and the host keeps those that a grammar takes. An
answer goes back to the first that it refuses, and the next window chooses another there, among those that may follow.
"""

import importlib.util
import json
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt32

_LONGEST = 65_536
"""Characters of a grammar, at most: some take long to compile."""


class Matcher(Protocol):
    """The place of one answer in a grammar."""

    def mask(self) -> UInt32[np.ndarray, " words"]:
        """Return a bit for each token, the lowest of a word first: those that may come next."""
        ...

    def take(self, tokens: list[int]) -> int:
        """Go on by the tokens before the first that may not come; return their number."""
        ...

    @property
    def is_complete(self) -> bool:
        """Return whether the answer may end here."""
        ...

    @property
    def is_over(self) -> bool:
        """Return whether no token may come next."""
        ...


class Grammar(Protocol):
    """Set of texts, of which an answer is to be one."""

    def start(self) -> Matcher:
        """Return the place of a new answer."""
        ...


def is_installed() -> bool:
    """Return whether llguidance is there."""
    return importlib.util.find_spec("llguidance") is not None


class Grammars:
    """Makes grammars of a model's tokens.

    Args:
        tokenizer: of the model, a fast one of transformers.
        vocabulary: of the model, which may be larger than the tokenizer's.
        stops: tokens that end an answer where a grammar lets it end.

    Raises:
        ValueError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, stops: Collection[int]):
        if not is_installed():
            raise ValueError("answers that follow a grammar need llguidance: pip install '.[serve]' in jaxglue's clone")
        from llguidance.hf import from_tokenizer

        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(stops) or None)
        self._words = -(-vocabulary // 32)

    def json(self, schema: dict[str, Any]) -> Grammar:
        """Return JSON of a schema; raise ValueError for one that is malformed or not supported."""
        return self._grammar("a JSON schema", json.dumps({"grammars": [{"json_schema": schema}]}))

    def regex(self, expression: str) -> Grammar:
        """Return texts that an expression of Rust's `regex` matches whole; raise ValueError for a malformed one."""
        from llguidance import LLMatcher

        return self._grammar("a regular expression", LLMatcher.grammar_from_regex(expression))

    def choice(self, texts: list[str]) -> Grammar:
        """Return one of some texts, none of which is empty."""
        return self.lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    def lark(self, grammar: str) -> Grammar:
        """Return texts of a context-free grammar in Lark's notation; raise ValueError for a malformed one."""
        return self._grammar("a grammar", grammar)

    def _grammar(self, name: str, text: str) -> "_Compiled":
        from llguidance import LLMatcher

        if len(text) > _LONGEST:
            raise ValueError(f"{name} has {len(text):,} characters: at most {_LONGEST:,} are taken")
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{name} is not understood: {matcher.get_error().strip()}")
        return _Compiled(matcher, self._words)


class _Compiled:
    """A grammar as llguidance reads it."""

    def __init__(self, matcher: Any, words: int):
        self._matcher, self._words = matcher, words

    def start(self) -> "_Place":
        return _Place(self._matcher.deep_copy(), self._words)


class _Place:
    """A matcher of llguidance."""

    def __init__(self, matcher: Any, words: int):
        self._matcher, self._words = matcher, words

    def mask(self) -> UInt32[np.ndarray, " words"]:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]

    def take(self, tokens: list[int]) -> int:
        return self._matcher.try_consume_tokens(tokens)

    @property
    def is_complete(self) -> bool:
        return not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped()
