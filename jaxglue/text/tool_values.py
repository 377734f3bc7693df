"""Values in the text of tool calls: JSON, calls of Python, and Gemma's objects."""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

_SEPARATOR = re.compile(r"[\s;]*")
_BARE_KEY = re.compile(r'(?<=[{,])\s*([^\s{}\[\],:"]+)\s*:')
_NONE = re.compile(r"(?<=[:,\[])\s*None(?=\s*[,}\]])")
_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def json_values(text: str) -> list[Any]:
    """Return the JSON values that a text consists of, perhaps between semicolons; none if it is anything else."""
    values, place = [], _end_of(_SEPARATOR.match(text))
    while place < len(text):
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        place = _end_of(_SEPARATOR.match(text, place))
    return values


def _end_of(found: re.Match | None) -> int:
    assert found is not None  # the pattern matches anywhere
    return found.end()


def json_value(text: str) -> Any:
    """Return the only JSON value that a text consists of; None if it is anything else."""
    found = json_values(text)
    return found[0] if len(found) == 1 else None


def as_object(value: Any) -> dict[str, Any]:
    """Return an object of JSON, or an empty one in place of another value."""
    return value if isinstance(value, dict) else {}


def gemma_object(text: str, quote: str) -> Any:
    """Return the value of an object with bare keys, and texts between quotes of their own; None if it is no object."""
    if (found := json_value(text)) is not None:
        return found
    plain = (_NONE.sub("null", _BARE_KEY.sub(r'"\1":', part)) for part in text.split(quote)[::2])
    texts = map(json.dumps, text.split(quote)[1::2])
    return json_value("".join(piece for pair in zip(plain, [*texts, ""], strict=False) for piece in pair))


def python_calls(code: str, parameters: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the functions and arguments of calls, of which a text has one a line, or a list; none for another text.

    Args:
        code: the text, with Python's or JSON's constants.
        parameters: of functions by name, in whose order arguments without a name are.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in strings
            body = ast.parse(code.strip()).body
        values = [part.value if isinstance(part, ast.Expr) else part for part in body]
        listed = [item for value in values for item in (value.elts if isinstance(value, ast.List) else [value])]
        found = [_python_call(call, parameters) for call in listed]
        json.dumps(found, allow_nan=False)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return []
    return found


def _python_call(call: ast.AST, parameters: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, ast.Call):
        raise ValueError("no call")
    name = ast.unparse(call.func).removesuffix(".call")  # of Llama's built-in tools
    given = [*zip(parameters.get(name, {}), call.args, strict=False)] + [(k.arg, k.value) for k in call.keywords]
    if len(given) < len(call.args) + len(call.keywords) or not all(key for key, _ in given):
        raise ValueError("arguments without a name")
    return name, {str(key): _literal(value) for key, value in given}


def _literal(value: ast.AST) -> Any:
    if isinstance(value, ast.Name) and value.id in _NAMES:
        return _NAMES[value.id]
    if isinstance(value, ast.List | ast.Tuple):
        return [_literal(item) for item in value.elts]
    if isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
        return {str(_literal(key)): _literal(item) for key, item in zip(value.keys, value.values, strict=True) if key}
    return ast.literal_eval(value)
