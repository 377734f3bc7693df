"""Columns of rows that their format does not use."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxglue.data.files import Row
from jaxglue.data.formats import KEYS
from jaxglue.data.messages import WEIGHTS, listed
from jaxglue.data.preference import KEYS as ANSWER_KEYS
from jaxglue.data.preference import PAIRS

_REQUIRED = KEYS | ANSWER_KEYS
_TRAINED = (*WEIGHTS, "train_detail")
_CHAT = ("system", "tools")
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "messages": _CHAT,
    "conversations": _CHAT,
    "prompt_completion": _CHAT,
    "alpaca": ("input", "history", "system"),
    "alpaca_chat": ("input", "history", "system"),
    "question_answer": ("system",),
    PAIRS: ("prompt", "margin", *_CHAT),
    "labeled": ("messages", "prompt", "completion", *_CHAT),
}
"""Keys that a format uses beside its required ones."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def unused_columns(rows: Iterable[Row], format: str) -> list[str]:
    """Return the columns with values that the format does not use, in order of appearance."""
    found: dict[str, None] = {}
    for row in rows:
        used = {*_used(row.value, format), *found}
        found |= dict.fromkeys(key for key, value in row.value.items() if key not in used and value not in _EMPTY)
    return list(found)


def unused_note(source: object, format: str, columns: list[str]) -> str:
    """Describe the columns of a source that its format does not use."""
    return f"{source}: columns that the format {format} does not use: {listed(columns)}"


def _used(row: Mapping[str, Any], format: str) -> Iterable[str]:
    first_turns = format == PAIRS and row.get("prompt") is None and isinstance(row.get("chosen"), Mapping)
    beside = ("conversations", "messages") if first_turns else ()
    return (*_REQUIRED[format], *_OPTIONAL.get(format, ()), *_TRAINED, *beside)
