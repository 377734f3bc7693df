"""Tool calls in the text of an answer, in the formats of model families, for OpenAI's clients.

Text that is no call of a tool that the request offers stays text.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxglue.generation.text import cut

CALLS = "[TOOL_CALLS]"
"""Special token before calls (Mistral)."""
MARKS = (
    CALLS,
    "[ARGS]",
    "[CALL_ID]",
    "<tool_call>",
    "</tool_call>",
    *(f"<{s}arg_{k}>" for k in ("key", "value") for s in ("", "/")),
)
"""Texts in and around calls, which may be special tokens."""
_TAG, _THINKING = "<tool_call>", "</think>"
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)\s*", re.DOTALL)
_XML = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_KEYED = re.compile(r"([^<>\s]+)\s*((?:<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>\s*)*)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<role>\s*to=[^\s<]+)?\s*<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<body>.*?)(?:<\|call\|>|<\|end\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
"""In a message's role or after its channel."""
_ADDRESSED = "to=functions."
_START = "<|start|>assistant"
_HEADERS = [f"<|channel|>{channel} to=" for channel in ("commentary", "analysis")]
_HEADERS = [f"{_START} to=", *(_START + header for header in _HEADERS), *_HEADERS]
_NAMED = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_SEPARATOR = re.compile(r"[\s;]*")


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """JSON."""


def schemas_of(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the functions that tools offer, with the schemas of their arguments."""
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    named = [function for function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)]
    return {function["name"]: as_object(function.get("parameters")) for function in named}


def parameters_of(schemas: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the functions of `schemas_of` with the schema of each parameter."""
    return {name: as_object(schema.get("properties")) for name, schema in schemas.items()}


def shown_before_calls(text: str) -> str:
    """Return the beginning of a growing text that certainly is no tool call."""
    thinking, end, answer = text.rpartition(_THINKING)
    begin = answer.lstrip()
    if begin[:1] in ("{", "[") or _ADDRESSED.startswith(begin[: len(_ADDRESSED)]):
        return thinking + end
    return thinking + end + cut(answer, (_TAG, *_HEADERS, CALLS))[0]


def split_calls(text: str, functions: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return the text beside tool calls, and these; all of the text if anything that looks like one is none.

    Thinking, which may try calls, is text.
    """
    thinking, end, answer = text.rpartition(_THINKING)
    for find in (_tagged, _harmony, _listed):
        rest, calls = find(answer, functions)
        if calls and all(call.name in functions for call in calls):
            return thinking + end + rest, calls
    return text, []


def _tagged(text: str, functions: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read `<tool_call>` with JSON (Hermes, Qwen), or tags of parameters (Qwen3-Coder), or of keys and values (GLM)."""
    calls = []
    for block in map(str.strip, _BLOCK.findall(text)):
        found = list(_tags(block, functions)) if block.startswith("<function=") else _json_calls(block)
        found = found or _keyed(block, functions)
        if not found:
            return text, []
        calls += found
    return _BLOCK.sub("", text), calls


def _tags(block: str, functions: dict[str, dict[str, Any]]) -> Iterator[ToolCall]:
    for name, body in _XML.findall(block):
        schemas = functions.get(name, {})
        given = {key: _value(value, as_object(schemas.get(key))) for key, value in _PARAMETER.findall(body)}
        yield ToolCall(name, json.dumps(given, ensure_ascii=False))


def _keyed(block: str, functions: dict[str, dict[str, Any]]) -> list[ToolCall]:
    if (found := _KEYED.fullmatch(block)) is None:
        return []
    schemas = functions.get(found[1], {})
    pairs = [(key.strip(), value.strip()) for key, value in _PAIR.findall(found[2])]
    given = {key: _value(value, as_object(schemas.get(key))) for key, value in pairs}
    return [ToolCall(found[1], json.dumps(given, ensure_ascii=False))]


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Return a parameter that is written as text, in the type that its schema says."""
    if schema.get("type") == "string":
        return text
    found = _values(text)
    return found[0] if len(found) == 1 else text


def _harmony(text: str, _: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read messages to functions, whatever their channel (GPT-OSS)."""
    calls, rest, end = [], "", 0
    for message in _MESSAGE.finditer(text):
        to = _RECIPIENT.search(f"{message['role'] or ''} {message['channel']}")
        arguments = _loaded(message["body"]) if to else None
        if to and not isinstance(arguments, dict):
            return text, []
        if to:
            calls.append(ToolCall(to[1], json.dumps(arguments, ensure_ascii=False)))
            rest, end = rest + text[end : message.start()], message.end()
    return rest + text[end:], calls


def _listed(text: str, _: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read a text of calls alone (Llama 3), or after special tokens: lists, or names with arguments (Mistral)."""
    before, *parts = text.split(CALLS)
    if not parts:
        return "", _json_calls(text)
    found = [_json_calls(part) or _named_call(part.strip()) for part in parts]
    return before, [call for calls in found for call in calls] if all(found) else []


def _named_call(text: str) -> list[ToolCall]:
    named = _NAMED.fullmatch(text)
    arguments = _loaded(named[2]) if named else None
    if named is None or not isinstance(arguments, dict):
        return []
    return [ToolCall(named[1], json.dumps(arguments, ensure_ascii=False))]


def _json_calls(text: str) -> list[ToolCall]:
    """Return the calls that a text of JSON values, perhaps between semicolons, consists of; none for any other."""
    values, calls = _values(text), []
    for call in (call for value in values for call in (value if isinstance(value, list) else [value])):
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return []
        calls.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _values(text: str) -> list[Any]:
    """Return the JSON values that a text consists of; none if it is anything else."""
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


def _loaded(text: str) -> Any:
    found = _values(text)
    return found[0] if len(found) == 1 else None


def as_object(value: Any) -> dict[str, Any]:
    """Return an object of JSON, or an empty one in place of another value."""
    return value if isinstance(value, dict) else {}
