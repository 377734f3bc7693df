"""Rules of grammars in Lark's notation, as llguidance reads it, with special tokens by their ids."""

import json
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from jaxglue.text.stream import AddedTokens, added_tokens

SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space between parts of JSON, of which a model could otherwise write any number."""
_TEXT = "/(?s:.*)/"
_IN_BRACKETS = re.compile("<.*>", re.DOTALL).fullmatch
"""Tells added tokens that are special to llguidance, whatever the tokenizer says."""


class Rules:
    """Rules of a grammar in Lark's notation, in which special tokens of texts are named by their ids.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any):
        self._specials, self._plain, self._splits = _special_tokens(added_tokens(tokenizer))
        self._names = dict[tuple[str, str], str]()

    @property
    def lines(self) -> list[str]:
        """Return the rules."""
        return [f"{name}{options}: {body}" for (body, options), name in self._names.items()]

    def add(self, body: str, options: str = "") -> str:
        """Add a rule, unless it is there; return its name."""
        return self._names.setdefault((body, options), f"r{len(self._names)}")

    def text(self, text: str) -> str:
        """Return the body of exactly this text."""
        pieces = [piece for piece in self._splits.split(text) if piece]
        return " ".join(f"<[{self._specials[p]}]>" if p in self._specials else quoted(p) for p in pieces)

    def until(self, end: str) -> str:
        """Return the body of any text and its end."""
        if (special := self._splits.match(end)) is None:
            return self.add(_TEXT, f"[suffix={quoted(end)}]")
        tokens = _ranges({*self._plain} - {self._specials[special[0]]})
        text = self.add(f"(/(?s:.+)/ | <[{tokens}]>)*") if tokens else self.add(_TEXT)
        return f"{text} {self.text(end)}"


@lru_cache(maxsize=16)
def _special_tokens(added: AddedTokens) -> tuple[dict[str, int], frozenset[int], re.Pattern[str]]:
    """Return the tokens that are special to llguidance, the ids of those that are text else, and what finds all."""
    specials = {text: id for text, id in added.all.items() if text in added.special or _IN_BRACKETS(text)}
    splits = re.compile(f"({'|'.join(map(re.escape, specials)) or '(?!)'})")
    return specials, frozenset(id for text, id in specials.items() if text not in added.special), splits


def _ranges(ids: Collection[int]) -> str:
    """Return ids in llguidance's notation, consecutive ones together."""
    firsts = sorted(id for id in ids if id - 1 not in ids)
    lasts = sorted(id for id in ids if id + 1 not in ids)
    return ",".join(f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True))


def quoted(text: str) -> str:
    """Return a text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)
