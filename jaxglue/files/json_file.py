"""JSON files: strangers' are bounded in size and depth, every defect one line; ours are written whole or not at all."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxglue.files.atomic import atomic_file
from jaxglue.files.regular_file import MAX_BYTES, read_regular

_SPACE = re.compile(r"[ \t\r\n]*")
MAX_DEPTH = 64
"""Nesting of lists and objects; published files have fewer than 10 levels."""


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the JSON object in `path`.

    Raises:
        ValueError: no regular file, too large, not UTF-8, not JSON (with line and column), nested too deeply,
            or not an object.
    """
    return parse_object(read_regular(path, MAX_BYTES), str(path))


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
    with _named_defects(source):
        text = _decoded(text)
        content = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
        if text.count("[") + text.count("{") > MAX_DEPTH and is_deeper(content, MAX_DEPTH):
            raise RecursionError
    return content


def parse_array(text: str | bytes, source: str) -> Iterator[tuple[Any, int]]:
    """Yield the items of a JSON array, each with its length in characters, as they are asked for.

    All at once would take many times the text's memory. Arguments and errors are those of `parse_json`.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    with _named_defects(source):
        text = _decoded(text)
        end = _after_space(text, text.index("[") + 1)
        closed = text.startswith("]", end)
        while not closed:
            start = end
            item, end = decoder.raw_decode(text, start)
            if is_deeper(item, MAX_DEPTH - 1):
                raise RecursionError
            yield item, end - start
            end = _after_space(text, end)
            closed = text.startswith("]", end)
            if not closed:
                if not text.startswith(",", end):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
                end = _after_space(text, end + 1)
        if (end := _after_space(text, end + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, end)


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _decoded(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("utf-8-sig")


@contextmanager
def _named_defects(source: str) -> Iterator[None]:
    """Name the source in the body's errors of decoding and parsing."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise MalformedJSONError(f"{source}: malformed JSON at {place}: {error.msg}") from error
    except RecursionError:
        raise ValueError(f"{source}: nested more than {MAX_DEPTH} levels deep") from None
    except _RepeatedKeyError as error:
        raise ValueError(f"{source}: {error}") from None
    except ValueError:
        raise ValueError(f"{source}: malformed JSON: a number of more than 4,300 digits") from None


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
