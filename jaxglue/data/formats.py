"""Row formats: detection, and normalization of chats."""

import json
from collections.abc import Mapping
from typing import Any

KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Required keys by format, in order of detection."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by ShareGPT's names."""


def detect_format(row: Mapping[str, Any]) -> str:
    """Detect a row's format from its keys.

    Raises:
        ValueError: no format matches; lists the row's keys and the known formats.
    """
    for name, keys in KEYS.items():
        if all(key in row for key in keys):
            return name
    known = "; ".join(f"{name}: {' and '.join(keys)}" for name, keys in KEYS.items())
    raise ValueError(f"unknown row format: the keys are {_listed(row)}; known formats and their keys are {known}")


def text_fields(row: Mapping[str, Any], format: str) -> list[str]:
    """Return the strings of a `text` or `prompt_completion` row.

    Raises:
        ValueError: a missing key or a non-string value.
    """
    _require_keys(row, format)
    for key in KEYS[format]:
        if not isinstance(row[key], str):
            raise ValueError(f"{key!r} must be a string, got {type(row[key]).__name__}; chats go under 'messages'")
    return [row[key] for key in KEYS[format]]


def chat_messages(row: Mapping[str, Any], format: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return (messages with `role` and `content`, tools) of a `messages` or `conversations` row.

    Raises:
        ValueError: a missing key, or messages other than a non-empty list of objects with roles.
    """
    _require_keys(row, format)
    messages = row[KEYS[format][0]]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{KEYS[format][0]!r} must be a non-empty list of messages")
    tools = row.get("tools")
    return [_message(message) for message in messages], _from_json(tools, "tools") or None


def _message(message: Any) -> dict[str, Any]:
    """Normalize `role`/`content` or ShareGPT's `from`/`value` to `role`/`content`."""
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise ValueError(f"a message needs 'role' and 'content' (or 'from' and 'value'), got {_listed(message)}")
    content = message.get("content", message.get("value"))
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(_from_json(content, "function_call"))]}
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"a {role!r} message has no content")
    kept = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    kept = {key: value for key, value in kept.items() if value is not None}
    if "tool_calls" in kept:
        kept["tool_calls"] = [_tool_call(call) for call in kept["tool_calls"]]
    return {"role": _ROLES.get(role, role), "content": "" if content is None else content, **kept}


def _tool_call(call: Any) -> dict[str, Any]:
    """Parse a tool call's arguments: templates would quote the JSON string of OpenAI's API again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"a tool call needs a function with 'name' and 'arguments', got {_listed(call)}")
    function = {**function, "arguments": _from_json(function.get("arguments"), "arguments of a tool call")}
    return {"type": "function", **{k: v for k, v in call.items() if k in ("id", "type")}, "function": function}


def _from_json(value: Any, name: str) -> Any:
    """Parse a JSON string; return other values unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: malformed JSON: {error}") from error


def _require_keys(row: Mapping[str, Any], format: str) -> None:
    if missing := [key for key in KEYS[format] if key not in row]:
        raise ValueError(f"a row of format {format!r} needs {_listed(missing)}; its keys are {_listed(row)}")


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) if isinstance(names, (dict, list)) else type(names).__name__
