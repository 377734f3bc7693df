"""Tool calls in the text of an answer, in the formats of model families, for OpenAI's clients.

Text that is no call of a tool that the request offers stays text.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from jaxglue.text.stream import TAGS, cut
from jaxglue.text.tool_values import as_object, gemma_object, json_value, json_values, python_calls

CALLS = "[TOOL_CALLS]"
"""Special token before calls (Mistral)."""
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
"""Texts around calls (DeepSeek)."""
CALL, NAME_END, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
"""Texts around each of these, and between its name and arguments, or between `function` and them."""
KIMI = tuple(
    f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
)
"""The same of Kimi-K2."""
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>'), ("<start_function_call>", "<end_function_call>", "<escape>")
"""Begin and end of a call, and quotes of texts in it (Gemma 4, FunctionGemma)."""
JSON_CALL, JSON_CALL_END = "<|tool_call|>", "<|/tool_call|>"
"""Texts around JSON of calls, of which Granite 3 writes the first alone (Phi-4-mini)."""
PYTHON, PYTHON_END = "<function_calls>", "</function_calls>"
"""Texts around calls of Python (OLMo 3)."""
_PYTHON_TAG = "<|python_tag|>"
"""Token before calls of built-in tools, and others (Llama 3)."""
_TAG, _FUNCTION = "<tool_call>", "<function="
_KEYS = tuple(f"<{slash}arg_{name}>" for name in ("key", "value") for slash in ("", "/"))
_SECTIONS = ((SECTION, SECTION_END, CALL, NAME_END, CALL_END), KIMI)
MARKS = frozenset(chain((CALLS, "[ARGS]", "[CALL_ID]", _TAG, "</tool_call>"), _KEYS, *_SECTIONS, *GEMMA))
MARKS |= {JSON_CALL, JSON_CALL_END, PYTHON, PYTHON_END, _PYTHON_TAG}
"""Texts in and around calls, which may be special tokens."""
_BLOCK = re.compile(r"(?:<tool_call>|(?=<function=))(.*?)(?:</tool_call>|\Z)\s*", re.DOTALL)
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
_FUNCTOOLS = "functools"
"""Before a list of calls (Phi-4-mini, whose special tokens are left out)."""
_BEGINS = (_TAG, _FUNCTION, *_HEADERS, CALLS, SECTION, CALL, KIMI[0], KIMI[2], JSON_CALL, PYTHON, _PYTHON_TAG)
_BEGINS += tuple(begin for begin, _, _ in GEMMA)
_FENCED = re.compile(r"(\S+)\s*```(?:json)?\s*(.*?)\s*(?:```)?", re.DOTALL)
_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """JSON."""


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def schemas_of(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the functions that tools offer, with the schemas of their arguments."""
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    named = [function for function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)]
    return {function["name"]: as_object(function.get("parameters")) for function in named}


def parameters_of(schemas: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the functions of `schemas_of` with the schema of each parameter."""
    return {name: as_object(schema.get("properties")) for name, schema in schemas.items()}


def shown_before_calls(text: str, functions: Collection[str] = (), *, known: int = 0) -> str:
    """Return the beginning of a growing text that certainly is no tool call.

    Args:
        text: received so far.
        functions: names of those that may be called.
        known: length of an earlier beginning, which is not searched again.
    """
    thinking, answer = _after_thinking(text)
    begin = answer.lstrip()
    addressed = _ADDRESSED.startswith(begin[: len(_ADDRESSED)])
    if addressed or begin[:1] in ("{", "[") or any(_may_call(begin, name) for name in (_FUNCTOOLS, *functions)):
        return thinking
    start = max(known - len(thinking), 0)
    return thinking + answer[:start] + cut(answer[start:], _BEGINS)[0]


def _may_call(begin: str, name: str) -> bool:
    """Return whether a text may go on to a function's name and an object, or a list."""
    return name.startswith(begin) or (begin.startswith(name) and begin[len(name) :].lstrip()[:1] in ("", "{", "["))


def split_calls(text: str, functions: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return the text beside tool calls, and these; all of the text if anything that looks like one is none.

    Thinking, which may try calls, is text.
    """
    thinking, answer = _after_thinking(text)
    for find in (_tagged, _harmony, _sectioned, _of_gemma, _of_python, _listed):
        rest, calls = find(answer, functions)
        if calls and all(call.name in functions for call in calls):
            return thinking + rest, calls
    return text, []


def _after_thinking(text: str) -> tuple[str, str]:
    """Return a text up to the end of its thinking, and the rest."""
    ends = ((text.rfind(tags.end), len(tags.end)) for tags in TAGS)
    end = max(place + length if place >= 0 else 0 for place, length in ends)
    return text[:end], text[end:]


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
        yield _call(name, given or as_object(json_value(body)))  # JSON in the tag: Llama 3.1's


def _keyed(block: str, functions: dict[str, dict[str, Any]]) -> list[ToolCall]:
    if (found := _KEYED.fullmatch(block)) is None:
        return []
    schemas = functions.get(found[1], {})
    pairs = [(key.strip(), value.strip()) for key, value in _PAIR.findall(found[2])]
    return [_call(found[1], {key: _value(value, as_object(schemas.get(key))) for key, value in pairs})]


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Return a parameter that is written as text, in the type that its schema says."""
    if schema.get("type") == "string":
        return text
    found = json_values(text)
    return found[0] if len(found) == 1 else text


def _harmony(text: str, _: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read messages to functions, whatever their channel (GPT-OSS)."""
    calls, rest, end = [], "", 0
    for message in _MESSAGE.finditer(text):
        if to := _RECIPIENT.search(f"{message['role'] or ''} {message['channel']}"):
            arguments = json_value(message["body"])
            if not isinstance(arguments, dict):
                return text, []
            calls.append(_call(to[1], arguments))
            rest, end = rest + text[end : message.start()], message.end()
    return rest + text[end:], calls


def _sectioned(text: str, __: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read calls of a name and JSON, all between tokens (DeepSeek, Kimi)."""
    for section, section_end, begin, middle, end in _SECTIONS:
        before, found, after = text.partition(begin)
        if found:
            *parts, last = after.split(begin)
            last, _, rest = last.partition(section_end)
            calls = [_sectioned_call(part.partition(end)[0], middle) for part in [*parts, last]]
            whole = [call for call in calls if call]
            return before.partition(section)[0] + rest, whole if len(whole) == len(calls) else []
    return text, []


def _sectioned_call(text: str, middle: str) -> ToolCall | None:
    head, _, body = text.partition(middle)
    name, arguments = _NUMBERED.fullmatch(head.strip()), json_value(body)
    if fenced := _FENCED.fullmatch(body.strip()):
        return _call(fenced[1], found) if isinstance(found := json_value(fenced[2]), dict) else None
    return _call(name[1], arguments) if name and isinstance(arguments, dict) else None


def _of_gemma(text: str, _: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read `call:` with a name and an object (Gemma)."""
    for begin, end, quote in GEMMA:
        before, *parts = text.split(begin)
        if parts:
            pairs = [part.partition(end)[0].strip().removeprefix("call:").partition("{") for part in parts]
            found = [(name.strip(), gemma_object(brace + rest, quote)) for name, brace, rest in pairs]
            whole = all(isinstance(arguments, dict) for _, arguments in found)
            return before, [_call(name, arguments) for name, arguments in found] if whole else []
    return text, []


def _of_python(text: str, functions: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read calls of Python: in tags (OLMo 3), after Llama 3's token for tools, or a list that is all of the text."""
    before, found, rest = text.partition(PYTHON)
    code, _, after = rest.partition(PYTHON_END)
    if not found:
        before, found, code = text.partition(_PYTHON_TAG)
    if not found:
        before, code = "", text if text.lstrip().startswith("[") else ""
    return before + after, [_call(name, given) for name, given in python_calls(code, functions)]


def _listed(text: str, _: dict[str, dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Read calls alone (Llama 3, GLM-4), or after special tokens: JSON, or names with arguments (Mistral, …)."""
    mark = next((mark for mark in (CALLS, JSON_CALL, _PYTHON_TAG) if mark in text), None)
    before, *parts = text.split(mark) if mark else ("", text.strip().removeprefix(_FUNCTOOLS))
    parts = [part.partition(JSON_CALL_END)[0] for part in parts]
    found = [_json_calls(part) or _named_call(part.strip()) for part in parts]
    return before, [call for calls in found for call in calls] if all(found) else []


def _named_call(text: str) -> list[ToolCall]:
    named = _NAMED.fullmatch(text)
    arguments = json_value(named[2]) if named else None
    return [_call(named[1], arguments)] if named and isinstance(arguments, dict) else []


def _json_calls(text: str) -> list[ToolCall]:
    """Return the calls that a text of JSON values, perhaps between semicolons, consists of; none for any other."""
    values, calls = json_values(text), []
    for call in (call for value in values for call in (value if isinstance(value, list) else [value])):
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        arguments = json_value(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return []
        calls.append(_call(call["name"], arguments))
    return calls
