"""JSON files: strangers' are bounded in size and depth, every defect one line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 256 * 2**20
"""Above every tokenizer.json and index of a published model."""
MAX_DEPTH = 64
"""Nesting of lists and objects; published files have fewer than 10 levels."""


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the JSON object in `path`.

    Raises:
        ValueError: too large, not UTF-8, not JSON (with line and column), nested too deeply, or not an object.
    """
    path = Path(path)
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path} has {size:,} bytes: at most {MAX_BYTES:,} are read")
    return parse_object(path.read_bytes(), str(path))


def numbered_lines(file: BinaryIO, source: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line that is not blank.

    Raises:
        ValueError: a line of more than `MAX_BYTES`.
    """
    for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), b""), 1):
        if len(line) > MAX_BYTES:
            raise ValueError(f"{source}:{number}: the line has more than {MAX_BYTES:,} bytes")
        if line.strip():
            yield number, line


def parse_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object; arguments and errors are those of `parse_json`, or another type."""
    content = parse_json(text, source)
    if not isinstance(content, dict):
        raise ValueError(f"{source} should hold a JSON object, but holds a {type(content).__name__}")
    return content


class MalformedJSONError(ValueError):
    """A text that is not JSON."""


class _RepeatedKeyError(ValueError):
    """A key that an object has twice."""


def parse_json(text: str | bytes, source: str, *, unique_keys: bool = False) -> Any:
    """Parse JSON of at most `MAX_DEPTH` levels.

    Args:
        text: UTF-8 if bytes, with or without a byte order mark.
        source: named by errors.
        unique_keys: refuse an object with a key twice, of which Python keeps the last.

    Raises:
        ValueError: not UTF-8, not JSON (with line and column), a number too long to read, or nested too deeply.
    """
    too_deep = f"{source}: nested more than {MAX_DEPTH} levels deep"
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise MalformedJSONError(f"{source}: malformed JSON at {place}: {error.msg}") from error
    except RecursionError:
        raise ValueError(too_deep) from None
    except _RepeatedKeyError as error:
        raise ValueError(f"{source}: {error}") from None
    except ValueError:
        raise ValueError(f"{source}: malformed JSON: a number of more than 4,300 digits") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deeper(content, MAX_DEPTH):
        raise ValueError(too_deep)
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _RepeatedKeyError(f"the key {repeated!r:.60} is there twice: leave one out")
    return content


def without_nulls(value: Any) -> Any:
    """Drop nulls: Arrow fills absent fields with them, which would confuse chat templates."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def is_deeper(content: Any, levels: int) -> bool:
    """Return whether containers nest beyond `levels`; level by level, as recursion would overflow."""
    containers = [content]
    for _ in range(levels):
        values = (c.values() if isinstance(c, dict) else c for c in containers if isinstance(c, dict | list))
        containers = [value for some in values for value in some if isinstance(value, dict | list)]
        if not containers:
            return False
    return True
