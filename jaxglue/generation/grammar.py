"""Answers held to a grammar: the engine's interface to one, and those that llguidance makes of schemas and expressions.

A window of steps runs without the host, so tokens are sampled freely, and the host keeps those that a grammar takes. An
answer goes back to the first that it refuses, and the next window chooses another there, among those that may follow.
"""

import importlib.util
import json
import re
from collections.abc import Collection, Iterator
from copy import copy
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt32

from jaxglue.text.lark import SPACING, Rules, quoted
from jaxglue.text.stream import CHANNEL, TAGS
from jaxglue.text.thinking import Thought, tags_of
from jaxglue.text.tool_values import as_object

_LONGEST = 65_536
"""Characters of a grammar, at most: some take long to compile."""
_SHOWN = 500
"""Characters of llguidance's own words about one."""
_LARGEST = 20_000
"""Characters of an expression with its counted repetitions written out, at most: larger ones take seconds a token."""
_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")


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

        self._tokens = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(stops) or None)
        self._words = -(-vocabulary // 32)
        self.tokenizer = tokenizer

    def of(self, tokenizer: Any) -> "Grammars":
        """Return the same for a tokenizer of the same tokens, whose template tells how an adapter thinks."""
        other = copy(self)
        other.tokenizer = tokenizer
        return other

    def json(self, schema: dict[str, Any], *, thinks: Thought = Thought.NONE) -> Grammar:
        """Return JSON of a schema; raise ValueError for one that is malformed or not supported.

        Args:
            schema: as an object.
            thinks: how an answer begins, which follows the schema after its thinking. So in other methods.
        """
        for pattern in _patterns(schema):
            _check_repetitions(pattern)
        return self._grammar("a JSON schema", json_schema={"x-guidance": SPACING, **schema}, thinks=thinks)

    def regex(self, expression: str, *, thinks: Thought = Thought.NONE) -> Grammar:
        """Return texts that an expression of Rust's `regex` matches whole; raise ValueError for a malformed one."""
        from llguidance import LLMatcher

        _check_repetitions(expression)
        (grammar,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
        return self._grammar("a regular expression", lark_grammar=grammar["lark_grammar"], thinks=thinks)

    def choice(self, texts: list[str], *, thinks: Thought = Thought.NONE) -> Grammar:
        """Return one of some texts, none of which is empty."""
        grammar = "start: " + " | ".join(map(quoted, texts))
        return self.lark(grammar, thinks=thinks)

    def lark(self, grammar: str, *, thinks: Thought = Thought.NONE) -> Grammar:
        """Return texts of a context-free grammar in Lark's notation; raise ValueError for a malformed one."""
        _check_repetitions(grammar)
        return self._grammar("a grammar", lark_grammar=grammar, thinks=thinks)

    def calls(self, grammar: str, *, thinks: Thought = Thought.NONE) -> Grammar:
        """Return calls of tools as of `call_grammar`, which in channels have one of their own."""
        return self._grammar("a tool", lark_grammar=grammar, thinks=thinks, final=False)

    def _before(self, thinks: Thought, *, final: bool) -> str | None:
        """Return the grammar of thinking, and of the final channel's header, before `@answer`; None without."""
        rules, tags = Rules(self.tokenizer), tags_of(self.tokenizer)
        text, until = rules.text, rules.until
        if thinks != Thought.NONE and CHANNEL in str(self.tokenizer.chat_template):
            body = f"({text('<|channel|>analysis<|message|>')} {until('<|end|>')} {text('<|start|>assistant')})*"
            if final:
                body += f" {text('<|channel|>final')} ({text(' <|constrain|>')} /[a-z]*/)? {text('<|message|>')}"
        elif thinks == Thought.BEGUN or (thinks == Thought.POSSIBLE and tags):
            begin, end = tags or TAGS[0]
            body = rf"{until(end)} /\n{{0,2}}/"
            if thinks == Thought.POSSIBLE:
                body = rf"(/\n{{0,2}}/ {text(begin)} {body})?"
        else:
            return None
        return "\n".join([f"start: {body} @answer", *rules.lines])

    def _grammar(self, name: str, *, thinks: Thought, final: bool = True, **answer: Any) -> "_Compiled":
        from llguidance import LLMatcher

        if (length := len(json.dumps(answer, ensure_ascii=False))) > _LONGEST:
            raise ValueError(f"{name} has {length:,} characters: at most {_LONGEST:,} are taken")
        before = self._before(thinks, final=final)
        grammars = [*([{"lark_grammar": before}] if before else []), {"name": "answer", **answer}]
        matcher = LLMatcher(self._tokens, json.dumps({"grammars": grammars}), log_level=0)
        if matcher.is_error():
            raise ValueError(f"{name} is not understood: {matcher.get_error().strip()[:_SHOWN]}")
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise ValueError(f"{name} is beyond the limits of a step: write a simpler one")
        return _Compiled(matcher, self._words)


def _patterns(schema: Any) -> Iterator[str]:
    """Yield the regular expressions of a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str):
                yield pattern
            yield from as_object(part.get("patternProperties"))
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _check_repetitions(expression: str) -> None:
    """Raise ValueError where an expression is large once its counted repetitions are written out."""
    sizes, last, index = [0], 0, 0
    while index < len(expression):
        character = expression[index]
        if character == "(":
            sizes.append(0)
            last = 0
        elif character == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif counted := _COUNTED.match(expression, index):
            count = max(int(number[:9]) for number in (counted[1], counted[2] or "", "1") if number)
            sizes[-1] += last * (count - 1)
            last *= count
            index = counted.end() - 1
        else:
            last = 1
            sizes[-1] += 1
            index += character == "\\"
        index += 1
    if (size := sum(sizes)) > max(_LARGEST, 2 * len(expression)):
        raise ValueError(f"an expression repeats up to {size:,} characters: at most {_LARGEST:,} are taken")


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
