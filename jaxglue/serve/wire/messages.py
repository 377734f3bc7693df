"""Anthropic's messages: their requests as those of chats, and answers as blocks and events."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.serve.answer_text import AnswerText
from jaxglue.serve.call import Call, chat_call, chat_prompt
from jaxglue.serve.fields import read_body
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError, readable
from jaxglue.serve.under_way import Answers, EventStream, sent
from jaxglue.serve.wire import Endpoint, Form

_MESSAGE = {"model", "messages", "system", "tools", "tool_choice", "thinking"}
_MESSAGE |= {"max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"}
_MESSAGE |= {"output_config", "output_format", "mcp_servers", "container"}
_ERRORS = {401: "authentication", 403: "permission", 404: "not_found", 413: "request_too_large", 429: "rate_limit"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Why an answer ended, by the reason of a chat's."""


async def _create(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, _MESSAGE, sees=host.sees)
    if body.get("max_tokens") is None:
        raise BadRequestError("max_tokens is missing", parameter="max_tokens")
    call = await chat_call(host, _chat_body(host, body))
    answers, writer = Answers(host, http, call), MessageWriter(call)
    if call.stream:
        return EventStream(_events(writer, answers), answers)
    await answers.finish(http)
    (answer,) = answers.texts
    for events in (writer.begin(), writer.add(answer.choice(0)["message"]), writer.end(answer)):
        for _ in events:
            pass
    return JSONResponse(writer.message)


async def _count(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, _MESSAGE, sees=host.sees)  # what decides the answer does not count
    prompt = await chat_prompt(host, _chat_body(host, body), bounded=False)
    return JSONResponse({"input_tokens": len(prompt.tokens)})


async def _events(writer: "MessageWriter", answers: Answers) -> AsyncIterator[str]:
    """Yield server-sent events of a message."""
    (answer,) = answers.texts
    try:
        for event in writer.begin():
            yield sent(event, event["type"])
        async for _ in answers.progress():
            if chunk := answer.chunk(0):
                for event in writer.add(chunk["delta"]):
                    yield sent(event, event["type"])
        for event in writer.end(answer):
            yield sent(event, event["type"])
    except BadRequestError as error:
        yield sent(_error_body(error), "error")


def _error_body(refusal: BadRequestError) -> dict[str, Any]:
    kind = _ERRORS.get(refusal.status, "api" if refusal.status >= 500 else "invalid_request")
    name = kind if kind == "request_too_large" else f"{kind}_error"
    return {"type": "error", "error": {"type": name, "message": readable(str(refusal))}}


def _chat_body(host: Host, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a chat that asks for the same.

    Raises:
        BadRequestError: contents, tools or settings of other kinds.
    """
    for name in ("mcp_servers", "container"):
        if body.get(name):
            raise BadRequestError(f"{name} are not served: leave them out", parameter=name)
    messages = [message for turn in _objects(body.get("messages"), "messages") for message in _messages(turn)]
    if body.get("system"):
        messages.insert(0, {"role": "system", "content": _text(body["system"], "system")})
    shared = ("model", "temperature", "top_p", "top_k", "max_tokens", "stream")
    chat: dict[str, Any] = {name: body[name] for name in shared if name in body}
    chat["messages"] = messages
    chat["stop"] = body.get("stop_sequences") or None
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(body)
    form = _object(_object(body, "output_config"), "format") or _object(body, "output_format")
    if form:
        chat["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
    template = str(host.models.find(body.get("model")).voice.tokenizer.chat_template)
    kind = _object(body, "thinking").get("type")
    variable = next((name for name in ("enable_thinking", "thinking") if name in template), None)
    variables: dict[str, Any] = {} if kind is None or variable is None else {variable: kind != "disabled"}
    if (effort := _object(body, "output_config").get("effort")) is not None and "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    chat["chat_template_kwargs"] = variables
    return chat


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return the tools of a chat, and which of them its answer calls."""
    chat: dict[str, Any] = {"tools": [_tool(tool) for tool in _objects(body.get("tools") or [], "tools")]}
    choice = _object(body, "tool_choice")
    chat["parallel_tool_calls"] = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type", "auto"):
        case "auto" | "none" as kind:
            chat["tool_choice"] = kind
        case "any":
            chat["tool_choice"] = "required"
        case "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        case other:
            message = f"tool_choice must be of type auto, any, tool or none, got {other!r:.100}"
            raise BadRequestError(message, parameter="tool_choice")
    return chat if chat["tools"] or chat["tool_choice"] not in ("auto", "none") else {}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"tools of type {tool['type']!r:.100} are not served: describe one with an input_schema"
        raise BadRequestError(message, parameter="tools")
    described = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        described["description"] = tool["description"]
    return {"type": "function", "function": described}


def _messages(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn: results of tools come before its text, and calls and thinking with it."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant"):
        raise BadRequestError(f"a role must be user or assistant, got {role!r:.100}", parameter="messages")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts, thoughts, calls = list[dict[str, Any]](), list[str](), list[dict[str, Any]]()
    for block in _objects(content, "content"):
        match block.get("type"), role:
            case "text", _:
                parts.append({"type": "text", "text": _text([block], "content")})
            case "image", "user":
                parts.append(_image(block))
            case "tool_result", "user":
                result = _result(block.get("content") or "")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            case "tool_use", "assistant":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking", "assistant":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking", "assistant":
                pass
            case kind, _:
                raise BadRequestError(
                    f"content of type {kind!r:.100} is not served: expected text", parameter="messages"
                )
    if parts or calls or role == "assistant":
        message: dict[str, Any] = {"role": role, "content": _contents(parts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        yield message | ({"tool_calls": calls} if calls else {})


def _contents(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a message's parts, or their text where all are texts."""
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _result(content: Any) -> str | list[dict[str, Any]]:
    """Return a tool's result as a message's content, with the images of its blocks."""
    if isinstance(content, str):
        return content
    blocks = _objects(content, "tool_result")
    return _contents(
        [
            _image(block) if block.get("type") == "image" else {"type": "text", "text": _text([block], "tool_result")}
            for block in blocks
        ]
    )


def _image(block: dict[str, Any]) -> dict[str, Any]:
    """Return an image as a chat's part: one of bytes by a data URL."""
    source = _object(block, "source")
    if source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": str(source.get("url"))}}
    if source.get("type") != "base64" or not isinstance(source.get("data"), str):
        raise BadRequestError("an image's source must be of type base64, with its data", parameter="messages")
    return {"type": "image_url", "image_url": {"url": f"data:{source.get('media_type')};base64,{source['data']}"}}


def _text(content: Any, name: str) -> str:
    """Return a text, or that of blocks of text."""
    if isinstance(content, str):
        return content
    for block in _objects(content, name):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            message = f"{name} of type {block.get('type')!r:.100} is not served: expected text"
            raise BadRequestError(message, parameter=name)
    return "".join(block["text"] for block in content)


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequestError(f"{name} must be a list of objects", parameter=name)
    if name == "messages" and not value:
        raise BadRequestError("messages must not be empty", parameter=name)
    return value


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise BadRequestError(f"{name} must be an object", parameter=name)
    return value or {}


class MessageWriter:
    """Events and blocks of a message as its answer grows."""

    def __init__(self, call: Call):
        self._blocks, self._blank = list[dict[str, Any]](), ""
        self.message: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self.message |= {"model": call.model, "content": [], "stop_reason": None, "stop_sequence": None}
        self.message["usage"] = {"input_tokens": len(call.requests[0].prompt), "output_tokens": 0}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the first event."""
        yield {"type": "message_start", "message": {**self.message, "usage": dict(self.message["usage"])}}

    def add(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chat's message, or of the new part of one."""
        yield from self._write("thinking", message.get("reasoning_content") or "")
        content = self._blank + (message.get("content") or "")
        is_blank = not content.strip() and not self._is_open("text")
        self._blank = content if is_blank else ""  # as before calls
        yield from self._write("text", "" if is_blank else content)
        for call in message.get("tool_calls", ()):
            yield from self._call(call)

    def end(self, answer: AnswerText) -> Iterator[dict[str, Any]]:
        """Yield the last events; the message then has everything."""
        if not self._blocks:
            yield from self._open({"type": "text", "text": ""})
        yield from self._close()
        assert answer.finish is not None
        reason = "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else _REASONS[answer.finish]
        if answer.stop_text is not None and reason == "end_turn":
            reason = "stop_sequence"
        ended = {"stop_reason": reason, "stop_sequence": answer.stop_text if reason == "stop_sequence" else None}
        self.message["usage"]["output_tokens"] = answer.count
        self.message |= {"content": self._blocks, **ended}
        yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.count}}
        yield {"type": "message_stop"}

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _is_open(self, kind: str) -> bool:
        return bool(self._blocks) and self._blocks[-1]["type"] == kind

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._blocks:
            yield {"type": "content_block_stop", "index": self._index}

    def _write(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events of new text in the block under way, or in a new one."""
        if not text:
            return
        if not self._is_open(kind):
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, kind: "", **signed})
        self._blocks[-1][kind] += text
        yield {"type": "content_block_delta", "index": self._index, "delta": {"type": f"{kind}_delta", kind: text}}

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        arguments = call["function"]["arguments"]
        id = f"toolu_{call['id'].removeprefix('call_')}"
        yield from self._open({"type": "tool_use", "id": id, "name": call["function"]["name"], "input": {}})
        yield {
            "type": "content_block_delta",
            "index": self._index,
            "delta": {"type": "input_json_delta", "partial_json": arguments},
        }
        self._blocks[-1]["input"] = json.loads(arguments)


FORM = Form(
    (Endpoint("/v1/messages", _create), Endpoint("/v1/messages/count_tokens", _count)),
    error=lambda refusal: JSONResponse(_error_body(refusal), refusal.status),
)
