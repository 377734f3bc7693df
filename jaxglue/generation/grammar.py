"""Answers held to a grammar: the engine's interface to one, and those that llguidance makes of schemas and expressions.

A window of steps runs without the host, so tokens are sampled freely, and the host keeps those that a grammar takes. An
answer goes back to the first that it refuses, and the next window chooses another there, among those that may follow.
"""

import importlib.util
import json
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt32

END = "</think>"
"""Ends the thinking of an answer."""
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
        special = next((id for id, t in tokenizer.added_tokens_decoder.items() if t.special and t.content == END), None)
        end = json.dumps(END)
        self._thought = (
            f"t[suffix={end}]: /(?s:.*)/\nstart: t" if special is None else f"start: /(?s:.*)/ <[{special}]>"
        )

    def json(self, schema: dict[str, Any], *, thinks: bool = False) -> Grammar:
        """Return JSON of a schema; raise ValueError for one that is malformed or not supported.

        Args:
            schema: as an object.
            thinks: the prompt has begun to think, and an answer goes on so up to the end of it. So in other methods.
        """
        return self._grammar("a JSON schema", json_schema=schema, thinks=thinks)

    def regex(self, expression: str, *, thinks: bool = False) -> Grammar:
        """Return texts that an expression of Rust's `regex` matches whole; raise ValueError for a malformed one."""
        from llguidance import LLMatcher

        (grammar,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
        return self._grammar("a regular expression", lark_grammar=grammar["lark_grammar"], thinks=thinks)

    def choice(self, texts: list[str], *, thinks: bool = False) -> Grammar:
        """Return one of some texts, none of which is empty."""
        grammar = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return self.lark(grammar, thinks=thinks)

    def lark(self, grammar: str, *, thinks: bool = False) -> Grammar:
        """Return texts of a context-free grammar in Lark's notation; raise ValueError for a malformed one."""
        return self._grammar("a grammar", lark_grammar=grammar, thinks=thinks)

    def _grammar(self, name: str, *, thinks: bool, **answer: Any) -> "_Compiled":
        from llguidance import LLMatcher

        if (length := len(json.dumps(answer, ensure_ascii=False))) > _LONGEST:
            raise ValueError(f"{name} has {length:,} characters: at most {_LONGEST:,} are taken")
        thought = [{"lark_grammar": rf"{self._thought} /\n{{0,2}}/ @answer"}] if thinks else []
        grammars = [*thought, {"name": "answer", **answer}]
        matcher = LLMatcher(self._tokenizer, json.dumps({"grammars": grammars}), log_level=0)
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
