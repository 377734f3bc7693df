"""JSON of untrusted files: bounded depth, and errors without tracebacks."""

import json
from typing import Any

MAX_DEPTH = 64
"""Levels of nested lists and objects in a row."""


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: malformed JSON, a number too long to read, or more than `MAX_DEPTH` levels; without the text.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"malformed JSON at {place}: {error.msg}") from None
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for parent in level for item in _items(parent)]
        if not level:
            return
    raise _too_deep()


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MAX_DEPTH} levels deep")
