"""Tool calls in the text of an answer, in the formats of model families, for OpenAI's clients.

Text that is no call of a tool that the request offers stays text.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxglue.generation.chat import cut

_TAG, _HARMONY, _LIST = "<tool_call>", "<|channel|>commentary to=functions.", "[TOOL_CALLS]"
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)\s*", re.DOTALL)
_XML = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>commentary to=functions\.([^\s<]+)[^<]*(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|\Z)",
    re.DOTALL,
)


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """JSON."""


def parameters_of(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the functions that tools offer, with the schemas of their parameters."""
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    named = [function for function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)]
    schemas = [(function["name"], function.get("parameters")) for function in named]
    return {name: _object(_object(schema).get("properties")) for name, schema in schemas}


def shown_before_calls(text: str) -> str:
    """Return the beginning of a growing text that certainly is no tool call."""
    if text.lstrip()[:1] in ("{", "["):
        return ""
    return cut(text, (_TAG, f"<|start|>assistant{_HARMONY}", _HARMONY, _LIST))[0]


def split_calls(text: str, functions: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return the text beside tool calls, and these; all of the text if anything that looks like one is none."""
    for find in (_tagged, _harmony, _listed):
        rest, calls = find(text, functions)
        if calls and all(call.name in functions for call in calls):
            return rest, calls
    return text, []


def _tagged(text: str, functions: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read `<tool_call>` with JSON (Hermes, Qwen) or with a function's and its parameters' tags (Qwen3-Coder)."""
    calls = []
    for block in map(str.strip, _BLOCK.findall(text)):
        found = list(_tags(block, functions)) if block.startswith("<function=") else _json_calls(block)
        if not found:
            return text, []
        calls += found
    return _BLOCK.sub("", text), calls


def _tags(block: str, functions: dict[str, dict[str, Any]]) -> Iterator[ToolCall]:
    for name, body in _XML.findall(block):
        schemas = functions.get(name, {})
        given = {key: _value(value, _object(schemas.get(key))) for key, value in _PARAMETER.findall(body)}
        yield ToolCall(name, json.dumps(given, ensure_ascii=False))


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Return a parameter that is written as text, in the type that its schema says."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _harmony(text: str, _: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read messages to functions of the commentary channel (GPT-OSS)."""
    calls = []
    for name, body in _MESSAGE.findall(text):
        arguments = _loaded(body)
        if not isinstance(arguments, dict):
            return text, []
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return _MESSAGE.sub("", text), calls


def _listed(text: str, _: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read a text that is one call or a list of them (Llama 3, Mistral), whose special token may stand before it."""
    before, marker, after = text.partition(_LIST)
    return (before, _json_calls(after)) if marker else ("", _json_calls(text))


def _json_calls(text: str) -> list[ToolCall]:
    """Return the calls that a JSON text consists of; none if it is anything else."""
    value = _loaded(text)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return []
        calls.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
