"""Rewards that ship: each judges one answer, or `None` where it cannot; options are texts of `--reward`.

The processes that judge answers import this file by its path, as files of users.
"""

import json
import logging
import math as numbers
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

_FINAL = re.compile(r"(?s:.*)(?:</think>|\[/THINK\]|<channel\|>)")
"""An answer up to the end of its thinking."""
_THINKS = ("<think>", "[THINK]", "<|channel>thought\n")
_MARKS = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""Marks between which math-verify looks for LaTeX."""
_COMMANDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{3,}")
_OPERATORS = re.compile(r"[-+*/^=_{}\\]")
_SECONDS = 2
"""Time for math-verify to read an answer, and for each comparison."""
_LONGEST_EXPRESSION = 300
"""Characters of a text that may be one expression, without marks around it."""


def exact(completion: str, answer: Any) -> float:
    """Return 1 for the text or number of the column `answer` after the thinking, without spaces around it."""
    return float(without_thinking(completion).strip() in expected_texts(answer, "answer"))


def math(completion: str, answer: Any = None, solution: Any = None) -> float | None:
    """Return 1 for an answer that math-verify finds equal to the column `answer` or `solution`; None where that is no
    mathematics."""
    name, value = ("solution", solution) if answer is None else ("answer", answer)
    gold = _gold(expected_texts(value, name)[-1])
    if not gold:
        return None
    from math_verify import verify

    return float(verify(gold, _parsed(without_thinking(completion)), timeout_seconds=_SECONDS))


def regex(completion: str, pattern: str) -> float:
    """Return 1 for an answer in which the pattern is found, in its thinking too; dots match newlines."""
    return float(re.search(pattern, completion, re.DOTALL) is not None)


def json_schema(completion: str, schema: str) -> float:
    """Return 1 for JSON that a file's schema allows, in a fence or not, after the thinking."""
    text = without_thinking(completion)
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)```\s*", text, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return float(_validator(schema).is_valid(value))
    except RecursionError:  # of the answer's depth
        return 0.0


def length(completion_ids: Sequence[int], soft: str, hard: str) -> float:
    """Return 0 up to `soft` tokens, −1 from `hard` on, and a line between (DAPO's overlong shaping)."""
    low, high = float(soft), float(hard)
    return -min(max((len(completion_ids) - low) / max(high - low, 1e-9), 0.0), 1.0)


def without_thinking(completion: str) -> str:
    """Return an answer after its thinking; nothing of one that only thinks."""
    if (thought := _FINAL.match(completion)) is not None:
        return completion[thought.end() :]
    return "" if completion.lstrip().startswith(_THINKS) else completion


def expected_texts(value: Any, column: str) -> list[str]:
    """Return the texts that stand for the value of a column, the plainest last.

    Raises:
        ValueError: no text or number, or one that no answer could give.
    """
    if isinstance(value, str) and (text := value.strip()):
        return [text]
    if isinstance(value, float) and numbers.isfinite(value):
        plain = f"{Decimal(repr(value)):f}"
        return [repr(value), plain, plain.removesuffix(".0")]
    if isinstance(value, int) and not isinstance(value, bool):
        return [str(value)]
    raise ValueError(f"the column {column} has {value!r:.80}, and an answer is compared with a text or a number")


def check_schema(file: str) -> None:
    """Raise ValueError for a file that is no JSON schema, or one that refers to others."""
    schema, validator = _schema(file), _validator(file)
    import jsonschema
    import referencing.exceptions

    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{file} is no JSON schema: {error.json_path}: {error.message:.200}") from None
    for name in _references(schema):
        try:
            _resolver(file).lookup(name)
        except referencing.exceptions.Unresolvable:
            raise ValueError(f"{file}: $ref {name:.200} is not in the file, and no other is read") from None


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@cache
def _gold(text: str) -> Sequence[Any]:
    """Return what an answer is compared with: also LaTeX without marks around it, and GSM8K's last line."""
    last = text.rpartition("####")[2].strip()
    return _parsed(last if last and "\n" not in last else text)


def _parsed(text: str) -> Sequence[Any]:
    """Return the mathematics in a text: between marks, the whole of an expression, or the last of a sentence."""
    try:
        from math_verify import parse
    except ImportError as error:
        raise ImportError("--reward math needs math-verify: pip install '.[rl]' in the clone of jaxglue") from error
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it writes out answers that take too long
    readings = [text]
    if _MARKS.search(text) is None and len(text) <= _LONGEST_EXPRESSION:
        words = _WORD.findall(_COMMANDS.sub("", text))
        is_sentence = len(words) > 1 or (words and not _OPERATORS.search(text))
        readings.insert(len(readings) if is_sentence else 0, f"\\boxed{{{text.strip()}}}")
    return next(filter(None, (parse(reading, parsing_timeout=_SECONDS) for reading in readings)), [])


@cache
def _schema(file: str) -> Any:
    try:
        return json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from None


@cache
def _validator(file: str) -> Any:
    try:
        import jsonschema
        import referencing
    except ImportError as error:
        raise ImportError(
            "--reward json_schema needs jsonschema: pip install '.[rl]' in the clone of jaxglue"
        ) from error
    # An empty registry: by default a schema's references are fetched over the network.
    return jsonschema.Draft202012Validator(_schema(file), registry=referencing.Registry())


@cache
def _resolver(file: str) -> Any:
    import referencing
    from referencing.jsonschema import DRAFT202012

    resource = DRAFT202012.create_resource(_schema(file))
    name = resource.id() or ""
    return referencing.Registry().with_resource(name, resource).crawl().resolver(name)


def _references(value: Any) -> Iterable[str]:
    """Yield the references of a schema."""
    if isinstance(value, dict):
        if isinstance(name := value.get("$ref"), str):
            yield name
        for part in value.values():
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)
