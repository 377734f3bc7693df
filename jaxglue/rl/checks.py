"""Rewards that ship: each judges one answer, or `None` where it cannot; options are texts of `--reward`.

The processes that judge answers import this file by its path, as files of users.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


def exact(completion: str, answer: Any) -> float:
    """Return 1 for the text of the column `answer`, without spaces around it."""
    return float(completion.strip() == str(answer).strip())


def math(completion: str, answer: Any = None, solution: Any = None) -> float | None:
    """Return 1 for an answer that math-verify finds equal to the column `answer` or `solution`; None where that is no
    mathematics."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("--reward math needs math-verify: pip install '.[rl]' in the clone of jaxglue") from error
    gold = parse(str(solution if answer is None else answer))
    return float(verify(gold, parse(completion))) if gold else None


def regex(completion: str, pattern: str) -> float:
    """Return 1 for an answer in which the pattern is found; dots match newlines."""
    return float(re.search(pattern, completion, re.DOTALL) is not None)


def json_schema(completion: str, schema: str) -> float:
    """Return 1 for JSON that a file's schema allows, in a fence or not."""
    try:
        import jsonschema
    except ImportError as error:
        raise ImportError(
            "--reward json_schema needs jsonschema: pip install '.[rl]' in the clone of jaxglue"
        ) from error
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)```\s*", completion, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else completion)
    except (ValueError, RecursionError):
        return 0.0
    return float(jsonschema.Draft202012Validator(_schema(schema)).is_valid(value))


@cache
def _schema(file: str) -> Any:
    return json.loads(Path(file).read_text(encoding="utf-8"))


def length(completion_ids: Sequence[int], soft: str, hard: str) -> float:
    """Return 0 up to `soft` tokens, −1 from `hard` on, and a line between (DAPO's overlong shaping)."""
    low, high = float(soft), float(hard)
    return -min(max((len(completion_ids) - low) / max(high - low, 1e-9), 0.0), 1.0)
