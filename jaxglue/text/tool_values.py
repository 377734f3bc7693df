"""Values in the text of tool calls, read whole or refused: JSON, Python's literals, Gemma's objects, texts in tags."""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

_SPACE = re.compile(r"\s*")
_BARE_KEY = re.compile(r'\s*([^{}\[\],:"<>]+?)\s*:')
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "None": None}
_WORD = re.compile(r"(?:true|false|null|None)(?=\s*[,}\]])")
_DEEPEST = 100
"""Objects and lists inside each other, at most."""
_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_UNIONS = ("anyOf", "oneOf")


class NoCallError(ValueError):
    """A text that is no whole value or call."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise NoCallError("an object has a key twice")
    return value


def _refuse(constant: str) -> None:
    raise NoCallError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise NoCallError(f"{number[:100]} is beyond all numbers")
    return value


# Line breaks in strings are read as they stand: models write them so.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is no white space."""
    return _end_of(_SPACE.match(text, start))


def _end_of(match: re.Match | None) -> int:
    assert match is not None  # the pattern matches anywhere
    return match.end()


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at an index, behind white space, and its end.

    Raises:
        NoCallError: no JSON, an object with a key twice, or a number beyond all.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except (ValueError, RecursionError) as error:
        raise NoCallError(f"no JSON: {error}") from error


def as_object(value: Any) -> dict[str, Any]:
    """Return an object of JSON, or an empty one in place of another value."""
    return value if isinstance(value, dict) else {}


def read_gemma(text: str, start: int, quote: str, depth: int = 0) -> tuple[Any, int]:
    """Return the value at an index, with bare keys and texts between quotes of their own, and its end.

    Raises:
        NoCallError: no such value.
    """
    if depth > _DEEPEST:
        raise NoCallError("too deep")
    start = skip_space(text, start)
    if text.startswith(quote, start):
        return _read_quoted(text, start + len(quote), quote, ",}]")
    if text.startswith("{", start):
        return _read_gemma_object(text, start + 1, quote, depth)
    if text.startswith("[", start):
        items, start = list[Any](), skip_space(text, start + 1)
        while not text.startswith("]", start):
            item, start = read_gemma(text, start, quote, depth + 1)
            items.append(item)
            start = _after_item(text, start, "]")
        return items, start + 1
    if word := _WORD.match(text, start):
        return _WORDS[word[0]], word.end()
    return read_json(text, start)


def _read_gemma_object(text: str, start: int, quote: str, depth: int) -> tuple[dict[str, Any], int]:
    pairs, start = list[tuple[str, Any]](), skip_space(text, start)
    while not text.startswith("}", start):
        if text.startswith(quote, start):
            key, start = _read_quoted(text, start + len(quote), quote, ":")
            start = skip_space(text, start) + 1
        elif text.startswith('"', start):
            key, start = read_json(text, start)
            start = skip_space(text, start) + 1
            if text[start - 1 : start] != ":":
                raise NoCallError("a key without a value")
        elif bare := _BARE_KEY.match(text, start):
            key, start = bare[1], bare.end()
        else:
            raise NoCallError("no key")
        value, start = read_gemma(text, start, quote, depth + 1)
        pairs.append((key, value))
        start = _after_item(text, start, "}")
    return _unique(pairs), start + 1


def _read_quoted(text: str, start: int, quote: str, followers: str) -> tuple[str, int]:
    """Return the text before the first quote that one of the followers comes after, and the end of that quote."""
    end = text.find(quote, start)
    while end >= 0:
        follower = skip_space(text, end + len(quote))
        if text[follower : follower + 1] and text[follower] in followers:
            return text[start:end], end + len(quote)
        end = text.find(quote, end + 1)
    raise NoCallError("a text without its end")


def _after_item(text: str, start: int, end: str) -> int:
    """Return the index of the next item, or of the end; raise NoCallError for anything else."""
    start = skip_space(text, start)
    if text.startswith(",", start):
        following = skip_space(text, start + 1)
        if not text.startswith(end, following):
            return following
    elif text.startswith(end, start):
        return start
    raise NoCallError("a list without its end")


def read_parameter(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a parameter that is written as text, in the type that its schema says.

    Where a string may stand, it is the text, but for null where that may stand too. Other values are JSON, or literals
    of Python, as templates write them by Jinja's `string`.
    """
    types = types_of(schema)
    if types is not None and "string" in types:
        return None if "null" in types and text in ("null", "None") else text
    try:
        value, end = read_json(text, 0)
        if skip_space(text, end) == len(text):
            return value
    except NoCallError:
        pass
    try:
        value = _python_value(text)
    except NoCallError:
        return text
    allowed = {"boolean", "array", "object"} if types is None else types
    return value if value is None or _TYPES.get(type(value)) in allowed else text


def types_of(schema: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Return the types of JSON that a schema allows; None where it does not say.

    Args:
        schema: of a parameter, with the definitions that it may name under `$defs` or `definitions`.
        depth: of the schema in others.
    """
    if depth > _DEEPEST:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        target: Any = definitions
        for part in reference.removeprefix("#/").split("/"):
            target = as_object(target).get(part.replace("~1", "/").replace("~0", "~"))
        return types_of({**definitions, **target}, depth + 1) if isinstance(target, dict) else None
    if "const" in schema:
        return frozenset({_TYPES.get(type(schema["const"]), "null")})
    if isinstance(choices := schema.get("enum"), list):
        return frozenset(_TYPES.get(type(choice), "null") for choice in choices)
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(filter(lambda name: isinstance(name, str), kind))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for key in _UNIONS:
        if isinstance(options := schema.get(key), list):
            several = [types_of({**shared, **as_object(option)}, depth + 1) for option in options]
            return frozenset[str]().union(*(types for types in several if types)) if all(several) else None
    if isinstance(parts := schema.get("allOf"), list):
        said = [types for part in parts if (types := types_of({**shared, **as_object(part)}, depth + 1)) is not None]
        return frozenset.intersection(*said) if said else None
    return None


def read_python_calls(code: str, parameters: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the functions and arguments of calls, of which a text has one a line, or a list.

    Args:
        code: the text, with Python's or JSON's constants.
        parameters: of functions by name, in whose order arguments without a name are.

    Raises:
        NoCallError: another text.
    """
    body = _parsed(code.strip(), "exec").body
    values = [part.value if isinstance(part, ast.Expr) else part for part in body]
    listed = [item for value in values for item in (value.elts if isinstance(value, ast.List) else [value])]
    if not listed:
        raise NoCallError("no call")
    return [_python_call(call, parameters) for call in listed]


def _parsed(code: str, mode: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in strings
            return ast.parse(code.encode(errors="backslashreplace"), mode=mode)  # halves of surrogate pairs
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoCallError(f"no Python: {error}") from error


def _python_value(text: str) -> Any:
    return _checked(_literal(_parsed(text.strip(), "eval").body))


def _python_call(call: ast.AST, parameters: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, ast.Call):
        raise NoCallError("no call")
    name = ast.unparse(call.func).removesuffix(".call")  # of Llama's built-in tools
    positional = [*zip(parameters.get(name, {}), call.args, strict=False)]
    if len(positional) < len(call.args) or not all(keyword.arg for keyword in call.keywords):
        raise NoCallError("arguments without a name")
    pairs = positional + [(str(keyword.arg), keyword.value) for keyword in call.keywords]
    return name, _unique([(key, _checked(_literal(value))) for key, value in pairs])


def _literal(value: ast.AST) -> Any:
    if isinstance(value, ast.Name) and value.id in _WORDS:
        return _WORDS[value.id]
    if isinstance(value, ast.List | ast.Tuple):
        return [_literal(item) for item in value.elts]
    if isinstance(value, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
        if not all(isinstance(key, str) for key in keys):
            raise NoCallError("a key that is no text")
        return _unique([(str(key), _literal(item)) for key, item in zip(keys, value.values, strict=True)])
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NoCallError(f"no literal: {error}") from error


def _checked(value: Any) -> Any:
    """Return a value that JSON can hold; two halves of a surrogate pair become the character."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise NoCallError(f"no JSON: {error}") from error


def properties_of(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of an object's properties, each with the definitions that it may name."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {name: {**shared, **as_object(value)} for name, value in as_object(schema.get("properties")).items()}
