"""Rows of preference data: two answers to a prompt, or one answer with a label."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxglue.data.formats import with_system
from jaxglue.data.messages import Chat, listed, read_chat, read_flag

Text = Chat | list[str]
"""A conversation, or the strings of a prompt and its answer."""
Answers = tuple[Text | None, Text | None]
"""(preferred, other); None where a row with a label has one answer."""

PAIRS = "preference"
"""Format of rows of two answers."""
KEYS: dict[str, tuple[str, ...]] = {PAIRS: ("chosen", "rejected"), "labeled": ("label",)}
"""Required keys by format, in order of detection."""
_LARGEST = 3e38
"""Largest margin."""
_TURN = re.compile(r"\n\n(Human|Assistant):[ \n]?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def detect_preference(row: Mapping[str, Any]) -> str:
    """Detect the format of a row of preference data from its keys.

    Raises:
        ValueError: neither two answers nor a label.
    """
    for name, keys in KEYS.items():
        if all(key in row for key in keys):
            return name
    raise ValueError(
        f"preference data need the keys 'chosen' and 'rejected', with 'prompt' or as whole conversations, or 'label' "
        f"with 'prompt' and 'completion'; the keys are {listed(row)}; rename keys with --columns, such as "
        "chosen=winner,rejected=loser"
    )


def read_answers(row: Mapping[str, Any], format: str) -> Answers:
    """Return the answers of a row, each with its prompt.

    Raises:
        ValueError: a missing key, a value of the wrong type, answers that are empty or equal, or conversations that do
            not begin alike.
    """
    if missing := [key for key in KEYS[format] if key not in row]:
        raise ValueError(f"a row of format {format!r} needs {listed(missing)}; its keys are {listed(row)}")
    first, second = _pair(row) if format == PAIRS else _labeled(row)
    return first and with_system(first, row), second and with_system(second, row)


def read_margin(row: Mapping[str, Any]) -> float:
    """Return the least difference of the answers' scores, 0 without one, NaN for anything but a number of float32."""
    margin = row.get("margin")
    if margin is None:
        return 0.0
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and abs(margin) <= _LARGEST
    return float(margin) if is_number else math.nan


def _pair(row: Mapping[str, Any]) -> Answers:
    if row["chosen"] == row["rejected"]:
        raise ValueError("'chosen' and 'rejected' are equal, so the row says nothing: remove it")
    prompt, chosen, rejected = row.get("prompt"), _conversation(row["chosen"]), _conversation(row["rejected"])
    if prompt is None and isinstance(row["chosen"], Mapping):  # LLaMA-Factory's and axolotl's rows
        prompt = row.get("conversations", row.get("messages"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            raise ValueError(
                "'chosen' and 'rejected' are strings: give their 'prompt' too, such as with --columns prompt=question, "
                "or whole conversations"
            )
        return _continued(prompt, chosen, "chosen", row), _continued(prompt, rejected, "rejected", row)
    if prompt is None or isinstance(prompt, str):
        return _divided(chosen, rejected, row.get("tools"), prompt)
    return _continued(prompt, chosen, "chosen", row), _continued(prompt, rejected, "rejected", row)


def _labeled(row: Mapping[str, Any]) -> Answers:
    label = read_flag(row["label"], "label")
    if "messages" in row:
        messages = read_chat(row["messages"], row.get("tools"), "messages")
        answer: Text = _with_prompt(messages, len(messages.messages) - 1, "messages")
    elif "prompt" in row and "completion" in row:
        answer = _continued(row["prompt"], row["completion"], "completion", row)
    else:
        raise ValueError(
            f"a row with 'label' needs 'prompt' and 'completion', or 'messages'; its keys are {listed(row)}"
        )
    return (answer, None) if label else (None, answer)


def _conversation(value: Any) -> Any:
    """Return the messages of a transcript in Anthropic's form, or of one message; other values unchanged."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman:"):
        return [value] if isinstance(value, Mapping) else value
    _, *parts = _TURN.split(value)
    return [{"role": _ROLES[who], "content": text} for who, text in zip(parts[::2], parts[1::2], strict=True)]


def _continued(prompt: Any, answer: Any, name: str, row: Mapping[str, Any]) -> Text:
    """Return a prompt with its answer: two strings, or two lists of messages."""
    if isinstance(prompt, str) and isinstance(answer, str):
        for key, text in (("prompt", prompt), (name, answer)):
            if not text:
                raise ValueError(f"{key!r} is empty: remove the row")
        return [prompt, answer]
    if not isinstance(prompt, list) or not isinstance(answer, list):
        raise ValueError(
            f"'prompt' and {name!r} must both be strings or both lists of messages, got {type(prompt).__name__} and "
            f"{type(answer).__name__}"
        )
    before, after = read_chat(prompt, row.get("tools"), "prompt"), read_chat(answer, None, name)
    return _with_prompt(
        Chat(before.messages + after.messages, before.tools, before.trained + after.trained), len(prompt), name
    )


def _divided(chosen: Any, rejected: Any, tools: Any, prompt: Any) -> Answers:
    """Return two conversations, whose common first messages are the prompt; a string `prompt` repeats one of them."""
    chats = read_chat(chosen, tools, "chosen"), read_chat(rejected, tools, "rejected")
    pairs = zip(*(chat.messages for chat in chats), strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chat.messages) for chat in chats))
    if not shared:
        raise ValueError("'chosen' and 'rejected' do not begin with the same message, so they answer no common prompt")
    if isinstance(prompt, str) and not any(prompt.strip() in m["content"] for m in chats[0].messages[:shared]):
        raise ValueError("'prompt' is in no message that 'chosen' and 'rejected' begin with: leave it out")
    return _with_prompt(chats[0], shared, "chosen"), _with_prompt(chats[1], shared, "rejected")


def _with_prompt(chat: Chat, prompt: int, name: str) -> Chat:
    """Return the chat with its first `prompt` messages not trained on, and the others checked."""
    answer = chat.messages[prompt:]
    if not answer or answer[0]["role"] != "assistant":
        found = f"a {answer[0]['role']!r} message" if answer else "nothing"
        raise ValueError(f"{name!r}: expected an assistant's answer after the prompt, got {found}")
    if not any(
        message["content"].strip() or message.get("tool_calls") for message in answer if message["role"] == "assistant"
    ):
        raise ValueError(f"{name!r}: the answer is empty: remove the row")
    flags = [False if message["role"] == "assistant" else None for message in chat.messages[:prompt]]
    return Chat(chat.messages, chat.tools, flags + chat.trained[prompt:])
