"""JSON from files of strangers: bounded in size and depth, every defect one line."""

import json
from pathlib import Path
from typing import Any

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
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object, but holds a {type(content).__name__}")
    return content


def parse_json(text: str | bytes, source: str) -> Any:
    """Parse JSON of at most `MAX_DEPTH` levels.

    Args:
        text: UTF-8 if bytes.
        source: named by errors.

    Raises:
        ValueError: not UTF-8, not JSON (with line and column), or nested too deeply.
    """
    too_deep = f"{source} is nested more than {MAX_DEPTH} levels deep"
    try:
        content = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError(too_deep) from None
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
    if is_deeper(content, MAX_DEPTH):
        raise ValueError(too_deep)
    return content


def is_deeper(content: Any, levels: int) -> bool:
    """Return whether containers nest beyond `levels`; level by level, as recursion would overflow."""
    containers = [content]
    for _ in range(levels):
        values = (c.values() if isinstance(c, dict) else c for c in containers if isinstance(c, dict | list))
        containers = [value for some in values for value in some if isinstance(value, dict | list)]
        if not containers:
            return False
    return True
