"""Row formats: detection, and the texts or the chat of a row."""

from collections.abc import Mapping
from typing import Any

from jaxglue.data.messages import Chat, listed, read_chat

KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "alpaca_chat": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "text": ("text",),
}
"""Required keys by format, in order of detection."""
CHATS = ("messages", "conversations", "question_answer", "alpaca_chat")
"""Formats that are rendered with the chat template."""
ALPACA = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Stanford Alpaca."""
_UNREAD = {
    "chat_template_kwargs": "write these settings into the template, and name it with --chat-template",
    "functions": "name them 'tools'",
}
"""Remedies by keys of other programs' chats that change the conversation, and are not read."""


def detect_format(row: Mapping[str, Any]) -> str:
    """Detect a row's format from its keys, first from those with values.

    Raises:
        ValueError: no format matches; lists the row's keys and the known formats.
    """
    for present in ({key for key, value in row.items() if value is not None}, row.keys()):
        if name := next((name for name, keys in KEYS.items() if present >= set(keys)), None):
            return name
    known = "; ".join(f"{name}: {' and '.join(keys)}" for name, keys in KEYS.items())
    hint = "rename keys with --columns, such as prompt=question,completion=answer"
    if "chosen" in row and "rejected" in row:
        hint = "rows of two answers need an --objective that compares them, such as dpo"
    raise ValueError(
        f"unknown row format: the keys are {listed(row)}; known formats and their keys are {known}; {hint}"
    )


def read_row(row: Mapping[str, Any], format: str) -> Chat | list[str]:
    """Return the chat of a row, or its strings: a prompt, if any, and a text to train on.

    Raises:
        ValueError: a missing key, a value of the wrong type, or a setting that is not read.
    """
    if missing := [key for key in KEYS[format] if key not in row]:
        raise ValueError(f"a row of format {format!r} needs {listed(missing)}; its keys are {listed(row)}")
    return with_system(_read_content(row, format), row)


def with_system(content: Chat | list[str], row: Mapping[str, Any]) -> Chat | list[str]:
    """Begin a chat that has no system message with its row's `system` text.

    Raises:
        ValueError: a text for a prompt that is no chat, or other settings that are not read.
    """
    text = row.get("system") or ""
    if not isinstance(content, Chat):
        if text and len(content) > 1:
            raise ValueError("'system' has a text, and the prompt is no chat: write the row as 'messages'")
        return content
    if unread := next((key for key in _UNREAD if row.get(key)), None):
        raise ValueError(f"{unread!r} is not read: {_UNREAD[unread]}")
    if not isinstance(text, str):
        raise ValueError(f"'system' must be a string, got {type(text).__name__}")
    return content.with_system(text) if text else content


def _read_content(row: Mapping[str, Any], format: str) -> Chat | list[str]:
    match format:
        case "messages" | "conversations":
            return read_chat(row[format], row.get("tools"), format)
        case "prompt_completion" if isinstance(row["prompt"], list):
            return _completed_chat(row)
        case "question_answer":
            return _exchange(*_strings(row, "question", "answer"))
        case "alpaca":
            instruction, given, output = _alpaca(row)
            return [alpaca_prompt(instruction, given), output]
        case "alpaca_chat":
            instruction, given, output = _alpaca(row)
            return _exchange(f"{instruction}\n\n{given}" if given else instruction, output)
    return _strings(row, *KEYS[format])


def alpaca_prompt(instruction: str, given: str) -> str:
    """Return the prompt of Stanford Alpaca for an instruction and its input, which may be empty."""
    context = ", paired with an input that provides further context" if given else ""
    section = f"### Input:\n{given}\n\n" if given else ""
    return ALPACA.format(instruction=instruction, context=context, input=section)


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    """Return instruction, input and output."""
    if row.get("history"):
        raise ValueError("the Alpaca format has no 'history': write such rows as 'messages'")
    return _strings({**row, "input": row.get("input") or ""}, "instruction", "input", "output")


def _completed_chat(row: Mapping[str, Any]) -> Chat:
    """Join TRL's lists of prompt and completion messages; only the completion's are trained on."""
    prompt = read_chat(row["prompt"], row.get("tools"), "prompt")
    completion = read_chat(row["completion"], None, "completion")
    trained = [False if message["role"] == "assistant" else None for message in prompt.messages]
    return Chat(prompt.messages + completion.messages, prompt.tools, [*trained, *completion.trained])


def _exchange(question: str, answer: str) -> Chat:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat(messages, None, [None, None])


def _strings(row: Mapping[str, Any], *keys: str) -> list[str]:
    for key in keys:
        if not isinstance(row[key], str):
            raise ValueError(f"{key!r} must be a string, got {type(row[key]).__name__}; chats go under 'messages'")
    return [row[key] for key in keys]
