"""OpenAI's Responses: their requests as those of chats, and answers as items and events."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.serve.answer_text import AnswerText, usage
from jaxglue.serve.call import Call, chat_call
from jaxglue.serve.fields import CHAT, read_body
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError, openai_body
from jaxglue.serve.under_way import Answers, EventStream, sent
from jaxglue.serve.wire import Endpoint, Form

_OF_CHATS = {"messages", "max_tokens", "max_completion_tokens", "n", "response_format", "reasoning_effort"}
_SHARED = CHAT - _OF_CHATS - {"logprobs", "top_logprobs", "stream_options"} | {"max_output_tokens"}
RESPONSE = _SHARED | {"input", "instructions", "text", "reasoning", "include", "truncation", "stream_options"}
"""Parameters of a request, of which the last three are ignored."""
_SETTINGS = ("instructions", "max_output_tokens", "temperature", "top_p", "text", "tool_choice", "tools", "reasoning")
"""Parameters that a response repeats."""
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Kinds of items of text, and those of their only parts."""
_LOG_PROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
"""Further fields of their events, without log-probabilities, which are not served."""


async def _respond(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, RESPONSE, sees=host.sees)
    call = await chat_call(host, chat_body(body))
    answers, writer = Answers(host, http, call), ResponseWriter(body, call)
    if call.stream:
        return EventStream(_events(writer, call, answers), answers)
    await answers.finish(http)
    (answer,) = answers.texts
    for _ in chain(writer.add(answer.choice(0)["message"]), writer.end(answer, usage(call.requests, [answer]))):
        pass
    return JSONResponse(writer.response)


async def _events(writer: "ResponseWriter", call: Call, answers: Answers) -> AsyncIterator[str]:
    """Yield server-sent events of a response."""
    (answer,) = answers.texts
    try:
        for event in writer.begin():
            yield sent(event, event["type"])
        async for _ in answers.progress():
            if chunk := answer.chunk(0):
                for event in writer.add(chunk["delta"]):
                    yield sent(event, event["type"])
        for event in writer.end(answer, usage(call.requests, [answer])):
            yield sent(event, event["type"])
    except BadRequestError as error:
        yield sent(openai_body(error), "error")


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a chat that asks for the same.

    Raises:
        BadRequestError: input, tools or formats of other kinds.
    """
    chat = {key: body[key] for key in body.keys() & _SHARED}
    chat["messages"] = _messages(body.get("input"))
    if (instructions := body.get("instructions")) is not None:
        chat["messages"].insert(0, {"role": "system", "content": instructions})
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _list_of_objects(tools, "tools")]
    if isinstance(choice := body.get("tool_choice"), dict):
        chat["tool_choice"] = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    if form := _object(body, "text").get("format"):
        described = form.get("type") == "json_schema" if isinstance(form, dict) else False
        chat["response_format"] = {"type": "json_schema", "json_schema": form} if described else form
    chat["reasoning_effort"] = _object(body, "reasoning").get("effort")
    return chat


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise BadRequestError(f"{name} must be an object", parameter=name)
    return value or {}


def _list_of_objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequestError(f"{name} must be a list of objects", parameter=name)
    return value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"tools of type {tool.get('type')!r:.100} are not served: expected function"
        raise BadRequestError(message, parameter="tools")
    return {
        "type": "function",
        "function": {key: value for key, value in tool.items() if key not in ("type", "strict")},
    }


def _messages(items: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat; calls of tools join the turn before them, and reasoning the one after it."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages, reasoning = list[dict[str, Any]](), dict[str, str]()
    for item in _list_of_objects(items, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content")), **reasoning})
        elif kind == "function_call":
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None, **reasoning})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            called = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(called)
        elif kind == "function_call_output":
            answer = {"tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            messages.append({"role": "tool", **answer})
        elif kind != "reasoning":
            raise BadRequestError(f"input of type {kind!r:.100} is not served", parameter="input")
        text = _content(item.get("content") or []) if kind == "reasoning" else ""
        reasoning = {"reasoning_content": text} if text else {}
    return messages


def _content(content: Any) -> Any:
    """Return a text, of parts, too; with images the parts as a chat has them."""
    if not isinstance(content, list):
        return content
    parts = _list_of_objects(content, "input")
    if any(part.get("type") == "input_image" for part in parts):
        return [part if part.get("type") == "input_image" else {**part, "type": "text"} for part in parts]
    for part in parts:
        if part.get("type") not in _TEXTS:
            message = f"input of type {part.get('type')!r:.100} is not served: expected text"
            raise BadRequestError(message, parameter="input")
        if not isinstance(part.get("text"), str):
            raise BadRequestError("a part of input has no text", parameter="input")
    return "".join(part["text"] for part in parts)


class ResponseWriter:
    """Events and items of a response as its answer grows.

    Args:
        body: of the request.
        call: of the chat that it asks for.
    """

    def __init__(self, body: dict[str, Any], call: Call):
        self._call, self._events, self._blank = call, 0, ""
        self._items = list[dict[str, Any]]()
        self.response: dict[str, Any] = {key: body.get(key) for key in _SETTINGS}
        self.response |= {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self.response |= {"model": call.model, "status": "in_progress", "output": [], "error": None, "metadata": {}}
        self.response |= {"incomplete_details": None, "usage": None, "previous_response_id": None, "store": False}
        self.response |= {"parallel_tool_calls": not call.one_call, "tools": body.get("tools") or []}
        self.response |= {"tool_choice": body.get("tool_choice") or "auto", "text": body.get("text") or {}}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the first events."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=dict(self.response))

    def add(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chat's message, or of the new part of one."""
        for kind, text in (("reasoning", message.get("reasoning_content")), ("message", message.get("content"))):
            if text and (text.strip() or self._is_open(kind)):
                yield from self._write(kind, self._blank + text)
            self._blank = text if text and not text.strip() and not self._is_open(kind) else ""
        for call in message.get("tool_calls", ()):
            yield from self._close()
            yield from self._add_call(call)

    def end(self, answer: AnswerText, usage: dict[str, int]) -> Iterator[dict[str, Any]]:
        """Yield the last events; the response then has everything."""
        if all(item["type"] == "reasoning" for item in self._items) and answer.finish != "length":
            yield from self._write("message", "")
        status = "incomplete" if answer.finish == "length" else "completed"
        yield from self._close(status)
        thought = "".join(part["text"] for i in self._items if i["type"] == "reasoning" for part in i["content"])
        thinking = self._call.voice.tokenizer.encode(thought, add_special_tokens=False)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": len(thinking)},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield self._event(status, response=self.response)

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": f"response.{kind}", "sequence_number": self._events - 1, **fields}

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        return self._event("output_item.added", output_index=len(self._items) - 1, item=item)

    def _write(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events of text of the item under way, or of a new one."""
        name = _PARTS[kind]
        if not self._is_open(kind):
            yield from self._close()
            specific: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            id = ("msg_" if kind == "message" else "rs_") + uuid.uuid4().hex
            yield self._added({"type": kind, "id": id, "status": "in_progress", "content": [], **specific})
            part: dict[str, Any] = {"type": name, "text": ""}
            if kind == "message":
                part["annotations"] = []
            yield self._event("content_part.added", **self._position, content_index=0, part=part)
            self._items[-1]["content"].append(part)
        if text:
            self._items[-1]["content"][0]["text"] += text
            yield self._event(f"{name}.delta", **self._position, content_index=0, delta=text, **_LOG_PROBS[kind])

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yield the end of the item under way, if there is one."""
        if not self._items or (item := self._items[-1])["status"] != "in_progress":
            return
        (part,), name = item["content"], _PARTS[item["type"]]
        item["status"] = status
        further = _LOG_PROBS[item["type"]]
        yield self._event(f"{name}.done", **self._position, content_index=0, text=part["text"], **further)
        yield self._event("content_part.done", **self._position, content_index=0, part=part)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _add_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        id = f"fc_{uuid.uuid4().hex}"
        item = {"type": "function_call", "id": id, "call_id": call["id"], "name": name, "arguments": ""}
        yield self._added({**item, "status": "in_progress"})
        self._items[-1] |= {"arguments": arguments, "status": "completed"}
        yield self._event("function_call_arguments.delta", **self._position, delta=arguments)
        yield self._event("function_call_arguments.done", **self._position, name=name, arguments=arguments)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=self._items[-1])


FORM = Form((Endpoint("/v1/responses", _respond),))
