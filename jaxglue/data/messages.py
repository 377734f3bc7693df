"""Messages of chats in one form: role, text content, tool calls, and whether they are trained on."""

import math
from typing import Any, NamedTuple

from jaxglue.files.json_file import parse_json, without_nulls
from jaxglue.vision.images import AUDIO_KEYS, COMMON_KEYS, IMAGE_KEYS
from jaxglue.vision.videos import VIDEO_KEYS

Messages = list[dict[str, Any]]
Tools = list[Any] | None

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
"""Roles by ShareGPT's names."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's reasoning."""
WEIGHTS = ("weight", "train", "training", "loss_weight")
"""Keys of OpenAI and axolotl that say whether a message or a row is trained on."""
_LARGEST = 3e38
"""Largest number of a column."""
_FLAGS = {"0": False, "1": True, "true": True, "false": False}


class Clip(NamedTuple):
    """A clip of audio as a column of a row holds it."""

    value: Any


class Video(NamedTuple):
    """A video as a column of a row holds it: a part of a message, or what such a part has under `video`."""

    value: Any


class Chat(NamedTuple):
    """A conversation."""

    messages: Messages
    """Each with `role` and `content`, a string, or a list of parts where there are images."""
    tools: Tools
    trained: list[bool | None]
    """For each message, whether the row says to train on it; None if it says nothing."""
    images: tuple[Any, ...] = ()
    """Images and clips in their order; of messages as they are read, None for those that a column of the row has, and
    parts that hold videos."""

    def with_system(self, text: str) -> "Chat":
        """Return the chat with a system message, unless it begins with one."""
        if self.messages[0]["role"] in ("system", "developer"):
            return self
        messages = [{"role": "system", "content": text}, *self.messages]
        return self._replace(messages=messages, trained=[None, *self.trained])

    def with_developer_as_system(self) -> "Chat":
        """Return the chat with the developer's messages as the system's, joined with those beside them."""
        messages, trained, is_developers = Messages(), list[bool | None](), False
        for message, train in zip(self.messages, self.trained, strict=True):
            role = message["role"]
            follows = bool(messages) and messages[-1]["role"] == "system" and role in ("system", "developer")
            if follows and (is_developers or role == "developer"):
                messages[-1] = messages[-1] | {"content": _joined(messages[-1]["content"], message["content"])}
            else:
                messages.append(message | {"role": "system"} if role == "developer" else message)
                trained.append(train)
            is_developers = role == "developer"
        return self._replace(messages=messages, trained=trained)


def read_chat(messages: Any, tools: Any, name: str, *, sees: bool = False) -> Chat:
    """Read the messages and tools of a row.

    Args:
        messages: with `role` and `content`, or ShareGPT's `from` and `value`.
        tools: a list of objects or of their JSON, or its JSON; may be None or empty.
        name: the messages' key, for errors.
        sees: contents may hold images.

    Raises:
        ValueError: messages other than a non-empty list of objects with roles and text, or malformed tools.
    """
    if isinstance(messages, str) and messages.lstrip().startswith("["):  # of a table
        messages = parse_json(messages, name)
    if not isinstance(messages, list) or not messages:
        found = "an empty one" if messages == [] else type(messages).__name__
        raise ValueError(f"{name!r} must be a non-empty list of messages, got {found}")
    images = list[Any]() if sees else None
    pairs = [_read_message(message, number, images) for number, message in enumerate(messages, 1)]
    read, trained = [message for message, _ in pairs], [trained for _, trained in pairs]
    return Chat(read, _read_tools(tools), trained, tuple(images or ()))


def _read_tools(tools: Any) -> Tools:
    """Return a row's tools, without nulls: Arrow fills each tool's parameters with those of the others."""
    tools = None if tools == "" else from_json(tools, "tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"'tools' must be a list, got {type(tools).__name__}")
    return [from_json(without_nulls(tool), "tools") for tool in tools or ()] or None


def _read_message(message: Any, number: int, images: list[Any] | None) -> tuple[dict[str, Any], bool | None]:
    try:
        return _message(message, images), read_weight(message)
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from error


def read_weight(item: dict[str, Any]) -> bool | None:
    """Return whether a message or row is trained on: its `weight` (0 or 1), `train`, … (`WEIGHTS`); None without them.

    Raises:
        ValueError: another value, or axolotl's `train_detail`.
    """
    if item.get("train_detail"):
        raise ValueError("'train_detail' is not supported: split the message, and give each part 'train'")
    for key in WEIGHTS:
        if (value := item.get(key)) is not None:
            return read_flag(value, key)
    return None


def read_flag(value: Any, name: str) -> bool:
    """Return a truth value, which tables write as a number or text.

    Raises:
        ValueError: another value.
    """
    flag = _FLAGS.get(str(value).lower().removesuffix(".0"))
    if flag is None:
        raise ValueError(f"{name!r} must be 0, 1, true or false, got {str(value)[:40]!r}")
    return flag


def number_of(value: Any) -> float:
    """Return a number of float32, which tables write as a text, also of a truth value; NaN for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= _LARGEST else math.nan


def from_json(value: Any, name: str) -> Any:
    """Parse a JSON string; return other values unchanged."""
    return parse_json(value, name) if isinstance(value, str) else value


def listed(names: Any) -> str:
    """Format the keys of a row for an error; of other values, their type."""
    if not isinstance(names, (dict, list)):
        return type(names).__name__
    return ", ".join(repr(name)[:60] for name in list(names)[:20]) or "none"


def _message(message: Any, images: list[Any] | None) -> dict[str, Any]:
    """Normalize `role`/`content` or ShareGPT's `from`/`value` to `role`/`content`; append images of its parts."""
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise ValueError(f"a message needs 'role' and 'content' (or 'from' and 'value'), got {listed(message)}")
    content, value = message.get("content", message.get("value")), message.get("value")
    if value is not None and value != content:
        raise ValueError(f"the {role!r:.100} message has both 'content' and 'value': remove one")
    if role == "function_call":
        calls = from_json(content, "function_call")
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": _tool_calls(calls if calls and isinstance(calls, list) else [calls]),
        }
    if (call := message.get("function_call")) is not None:  # OpenAI's, before tools
        calls = message.get("tool_calls")
        message = {**message, "tool_calls": [*([] if calls is None else _listed_calls(calls)), call]}
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"the {role!r:.100} message has no content")
    dropped = ("role", "from", "content", "value", "function_call", *WEIGHTS)
    kept = {key: value for key, value in message.items() if key not in dropped and value is not None}
    if wrong := next((key for key in REASONING if not isinstance(kept.get(key, ""), str)), None):
        raise ValueError(
            f"the {wrong!r} of the {role!r:.100} message must be a string, got {type(kept[wrong]).__name__}"
        )
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"])
    return {"role": _ROLES.get(role, role), "content": read_content(content, role, images), **kept}


def content_texts(content: str | list[dict[str, Any]]) -> list[str]:
    """Return the texts of a message's content between its images."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _joined(first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return two contents with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    texts = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in (first, "\n\n", second)]
    return [part for parts in texts for part in parts]


def without_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the images, videos and clips of their contents left out, whatever else these hold."""
    contents = (message.get("content") for message in messages)
    return [
        {**message, "content": [part for part in content if not _is_medium(part)]}
        if isinstance(content, list)
        else message
        for message, content in zip(messages, contents, strict=True)
    ]


def read_content(content: Any, role: str, images: list[Any] | None) -> str | list[dict[str, Any]]:
    """Return the text of a content, or its parts where there are images, which are appended."""
    if images is None or not isinstance(content, list) or not any(map(_is_medium, content)):
        return _text(content, role)
    parts = list[dict[str, Any]]()
    for part in content:
        if is_image(part):
            images.append(_image_of(part, "image"))
            parts.append({"type": "image"})
        elif is_video(part):
            images.append(part if any(_is_given(part.get(key)) for key in MEDIA_KEYS["video"]) else None)
            parts.append({"type": "video"} | ({} if part.get("fps") is None else {"fps": part["fps"]}))
        elif _is_clip(part):
            images.append(_image_of(part, "audio"))
            parts.append({"type": "audio"})
        elif text := _part(part, role):
            parts.append({"type": "text", "text": text})
    return parts


_IMAGE_PARTS = ("image", "image_url", "input_image")
_AUDIO_PARTS = AUDIO_KEYS
_KEYS = ("source", *COMMON_KEYS)
MEDIA_KEYS = {"image": (*IMAGE_KEYS, *_KEYS), "audio": (*AUDIO_KEYS, *_KEYS), "video": VIDEO_KEYS}
"""Keys of parts of a message under which their image, clip or video may be, by the parts' types."""
_DESCRIBING = {"type", "detail", "format", "media_type"}
"""Keys beside an image or clip in OpenAI's and Anthropic's parts."""


def _image_of(part: dict[str, Any], kind: str) -> Any:
    """Return what a part says its image or clip is, base64 as such; None where a column has it."""
    key = next((key for key in MEDIA_KEYS[kind] if _is_given(part.get(key))), None)
    value = None if key is None else part[key]
    if key in ("input_audio", "source") and isinstance(value, dict):  # OpenAI's and Anthropic's, whose data are base64
        key, value = ("url", value["url"]) if value.get("url") else ("data", value.get("data"))
    is_base64 = key in ("base64", "data") and isinstance(value, str) and not value.startswith("data:")
    return {"base64": value} if is_base64 else value


def _is_given(value: Any) -> bool:
    """Return whether a value of a part is more than empty, or an object of what only describes an image or clip."""
    if isinstance(value, dict):
        return not {key for key, each in value.items() if each not in (None, "")} <= _DESCRIBING
    return value not in (None, "", b"")


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") in _IMAGE_PARTS


def is_video(part: Any) -> bool:
    """Return whether a part of a message's content is a video."""
    return isinstance(part, dict) and part.get("type") in ("video", "video_url")


def _is_clip(part: Any) -> bool:
    """Return whether a part of a message's content is a clip of audio."""
    return isinstance(part, dict) and part.get("type") in _AUDIO_PARTS


def _is_medium(part: Any) -> bool:
    """Return whether a part of a message's content is an image, a video or a clip."""
    return is_image(part) or is_video(part) or _is_clip(part)


def _text(content: Any, role: str) -> str:
    """Join the text parts of a content."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(
            f"the content of the {role!r:.100} message must be a string or a list of text parts, got "
            f"{type(content).__name__}; write objects as JSON strings"
        )
    return "".join(_part(part, role) for part in content)


def _part(part: Any, role: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text", part.get("value")) if kind == "text" else None  # LLaMA-Factory's v1 has it as value
    if not isinstance(text, str):
        found = "text whose 'text' is none" if kind == "text" else f"type {kind!r:.100}: only text parts can be read"
        raise ValueError(f"the {role!r:.100} message has a part of {found}")
    return text


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    return [_tool_call(without_nulls(call)) for call in _listed_calls(calls)]


def _listed_calls(calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise ValueError(f"'tool_calls' must be a list, got {type(calls).__name__}")
    return calls


def _tool_call(call: Any) -> dict[str, Any]:
    """Parse a tool call's arguments: templates would quote the JSON string of OpenAI's API again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"a tool call needs a function with 'name' and 'arguments', got {listed(call)}")
    given = function.get("arguments", {})
    arguments = {} if given == "" else from_json(given, "arguments of a tool call")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call must be an object, got {arguments!r:.100}")
    function = {**function, "arguments": arguments}
    return {"type": "function", **{k: v for k, v in call.items() if k in ("id", "type")}, "function": function}
