"""OpenAI's HTTP interface to a loaded model: chat completions, completions and models, streamed or whole."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxglue.data.decoding import TokenDecoder
from jaxglue.data.messages import read_chat
from jaxglue.generation.chat import Assistant, TextStream, Voice, special_stops
from jaxglue.generation.config import SamplingConfig, ServeConfig
from jaxglue.generation.grammar import Grammar
from jaxglue.generation.prompts import encode_messages, encode_prompt, system_message
from jaxglue.generation.scheduler import Request
from jaxglue.generation.service import EndedError, Event, FullError, Service, Ticket
from jaxglue.generation.tool_calls import CALLS, ToolCall, parameters_of, shown_before_calls, split_calls

_LARGEST_BODY = 4 * 2**20
_MOST_ANSWERS = 16
_FINISH = {"stop": "stop", "until": "stop", "length": "length"}
_SAMPLING: dict[str, tuple[Any, float, float]] = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 1e-6, 1.0),
    "top_k": (int, 0, 2**31 - 1),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 1e-3, 1e3),
    "presence_penalty": (float, -1e3, 1e3),
    "frequency_penalty": (float, -1e3, 1e3),
    "seed": (int, -(2**53), 2**53),
}
"""Numbers that a request may set: type, least and greatest value."""
_IGNORED = {"user", "store", "metadata", "parallel_tool_calls", "service_tier"}
_KNOWN = {"model", "messages", "prompt", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "n", "stop"}
_KNOWN |= {"stream", "stream_options", "logit_bias", "logprobs", "top_logprobs"}
_GRAMMARS = {
    "json": (dict, "a JSON schema, as an object or text"),
    "regex": (str, "a regular expression"),
    "choice": (list, "a list of texts that are not empty"),
    "grammar": (str, "a grammar in Lark's notation"),
}
"""Kinds of grammars and their values; requests give `guided_…` or an entry of `structured_outputs`, as in vLLM."""
_KNOWN |= {"response_format", "structured_outputs", *(f"guided_{kind}" for kind in _GRAMMARS)}


class BadRequestError(Exception):
    """A request that is refused, with HTTP's status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Call:
    """A parsed request."""

    model: str
    voice: Voice
    request: Request
    stream: bool
    usage: bool
    """Report the tokens at the end of a stream."""
    log_probs: bool
    chat: bool
    functions: dict[str, dict[str, Any]]
    """The tools that the answer may call, with the schemas of their parameters."""


def make_app(assistant: Assistant, service: Service, config: ServeConfig) -> Starlette:
    """Return the application."""
    return _Server(assistant, service, config).app


class _Server:
    def __init__(self, assistant: Assistant, service: Service, config: ServeConfig):
        self._assistant, self._service, self._config = assistant, service, config
        none = np.zeros(assistant.ranks, np.bool_) if assistant.ranks else None
        base = Voice(assistant.tokenizer, assistant.stops, none)
        self._requests, self._voices = 0, {config.served_name: base, **assistant.voices}
        routes = [
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
            Route("/health", self._health),
        ]
        self.app = Starlette(routes=routes)

    def _guarded(self, handler: Callable) -> Callable:
        """Return the handler behind the token, with errors as OpenAI's clients read them."""

        async def run(http: HttpRequest) -> Response:
            try:
                self._check_token(http)
                return await handler(http)
            except ClientDisconnect:  # before the whole body came: nobody reads the answer
                return Response(status_code=499)
            except BadRequestError as error:
                return _error(str(error), error.status)
            except EndedError as error:
                return _error(str(error), 500)
            except FullError:
                return _error("too many requests wait: try again later", 429)
            except ValueError as error:
                return _error(str(error), 400)

        return run

    def _check_token(self, http: HttpRequest) -> None:
        if (wanted := self._config.api_key) is None:
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            raise BadRequestError("no or a wrong API key: send it as a bearer token", 401)

    async def _health(self, _: HttpRequest) -> Response:
        failure = self._service.failure
        return _error(failure, 503) if failure else JSONResponse({"status": "ok"})

    async def _models(self, _: HttpRequest) -> Response:
        shared = {"object": "model", "created": 0, "owned_by": "jaxglue"}
        return JSONResponse({"object": "list", "data": [{"id": name, **shared} for name in self._voices]})

    def _voice(self, body: dict[str, Any]) -> tuple[str, Voice]:
        """Return the name and the voice that a request asks for: the only one, whatever it says."""
        name, (first, *others) = body.get("model"), self._voices
        if not others or name is None:
            return first, self._voices[first]
        if not isinstance(name, str) or name not in self._voices:
            raise BadRequestError(f"model {name!r:.100} is not served: use one of {', '.join(self._voices)}", 404)
        return name, self._voices[name]

    async def _chat(self, http: HttpRequest) -> Response:
        body = await _read(http)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRequestError("messages must be a list of objects, and not empty")
        if self._config.system is not None and messages[0].get("role") != "system":
            messages = [*system_message(self._config.system), *messages]
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        chat = read_chat(messages, tools, "messages")
        tokens = encode_messages(self._voice(body)[1].tokenizer, chat.messages, chat.tools)
        return await self._answer(http, await self._call(body, tokens, chat=True, functions=parameters_of(chat.tools)))

    async def _complete(self, http: HttpRequest) -> Response:
        body = await _read(http)
        prompt = body.get("prompt")
        if isinstance(prompt, str) and prompt:
            tokens = encode_prompt(self._voice(body)[1].tokenizer, prompt, raw=True)
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            tokens = prompt
        else:
            raise BadRequestError("prompt must be a text or a list of token ids, and not empty")
        return await self._answer(http, await self._call(body, tokens, chat=False))

    async def _call(
        self, body: dict[str, Any], tokens: list[int], *, chat: bool, functions: dict[str, Any] | None = None
    ) -> Call:
        """Return a parsed request; refuse what would change the answer and is not known."""
        if unknown := [name for name in sorted(body.keys() - _KNOWN - _IGNORED - _SAMPLING.keys()) if body[name]]:
            raise BadRequestError(f"unknown or unsupported parameters: {', '.join(unknown)}")
        if body.get("top_logprobs"):
            raise BadRequestError("top_logprobs is not supported: leave it out, logprobs gives those of the answer")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise BadRequestError("tool_choice is not supported: the model alone chooses whether to call a tool")
        options = body.get("stream_options")
        if not isinstance(options, dict | None):
            raise BadRequestError("stream_options must be an object")
        settings = {name: _number(body, name, *limits) for name, limits in _SAMPLING.items()}
        settings = {name: value for name, value in settings.items() if value is not None}
        name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        room = max(self._service.length - len(tokens), 1)
        most = _number(body, name, int, 1, self._service.length)
        self._requests += 1
        settings.setdefault("seed", self._requests)
        defaults = {name: getattr(self._config.sampling, name) for name in _SAMPLING}
        sampling = SamplingConfig(
            **{**defaults, **settings}, max_tokens=room if most is None else most, stop=_stops(body)
        )
        count = _number(body, "n", int, 1, _MOST_ANSWERS) or 1
        biases = _biases(body, self._assistant.config.vocab_size)
        grammar = await asyncio.to_thread(self._grammar, body)
        name, voice = self._voice(body)
        stops = {*voice.stops, *special_stops(voice.tokenizer, sampling.stop)}
        asked: dict[str, Any] = {"stop": stops, "logit_bias": biases, "ranks": voice.ranks, "grammar": grammar}
        wanted = body.get("logprobs")  # in completions a number of alternatives
        return Call(
            model=name,
            voice=voice,
            request=Request(tokens, sampling, n=count, **asked),
            stream=bool(body.get("stream")),
            usage=bool(options and options.get("include_usage")),
            log_probs=bool(wanted) or (type(wanted) is int and not chat),
            chat=chat,
            functions=functions or {},
        )

    def _grammar(self, body: dict[str, Any]) -> Grammar | None:
        """Return what the answer may be, if the request says it."""
        found = _grammars(body)
        if not found:
            return None
        if len(found) > 1:
            raise BadRequestError("an answer follows one grammar: give one of response_format, guided_… and others")
        ((kind, value),) = found
        grammars = self._assistant.grammars
        if kind == "json":
            return grammars.json(value)
        if kind == "choice":
            return grammars.choice(value)
        return grammars.regex(value) if kind == "regex" else grammars.lark(value)

    async def _answer(self, http: HttpRequest, call: Call) -> Response:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def listen(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = self._service.submit(call.request, listen)
        answers = [_Answer(call) for _ in range(call.request.n)]
        if call.stream:
            return StreamingResponse(self._chunks(call, ticket, events, answers), media_type="text/event-stream")
        try:
            async for _ in self._progress(ticket, events, answers):
                if await http.is_disconnected():
                    break
        finally:
            self._service.cancel(ticket)
        choices = [answer.choice(index) for index, answer in enumerate(answers)]
        return JSONResponse({**self._head(call, stream=False), "choices": choices, "usage": _usage(call, answers)})

    async def _progress(self, ticket: Ticket, events: asyncio.Queue, answers: list["_Answer"]) -> AsyncIterator[int]:
        """Yield the index of each answer that got text or ended, until all have ended."""
        while any(answer.finish is None for answer in answers):
            event = await events.get()
            if event.error:
                raise BadRequestError(event.error, 500)
            answer = answers[event.answer]
            if answer.finish is None:
                answer.add(event)
                if answer.finish is not None and event.finish is None:
                    self._service.cancel(ticket, event.answer)  # at a stop text
                yield event.answer

    async def _chunks(self, call: Call, ticket: Ticket, events: asyncio.Queue, answers: list["_Answer"]):
        """Yield server-sent events."""
        head = self._head(call, stream=True)
        try:
            if call.chat:
                for index in range(len(answers)):
                    start = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    yield _sent({**head, "choices": [start]})
            async for index in self._progress(ticket, events, answers):
                if chunk := answers[index].chunk(index):
                    yield _sent({**head, "choices": [chunk]})
            if call.usage:
                yield _sent({**head, "choices": [], "usage": _usage(call, answers)})
            yield "data: [DONE]\n\n"
        except BadRequestError as error:
            yield _sent({"error": {"message": str(error), "type": "server_error"}})
        finally:
            self._service.cancel(ticket)

    def _head(self, call: Call, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * stream if call.chat else "text_completion"
        name = ("chatcmpl-" if call.chat else "cmpl-") + uuid.uuid4().hex
        return {"id": name, "object": kind, "created": int(time.time()), "model": call.model}


class _Answer:
    """Text of an answer as it grows."""

    def __init__(self, call: Call):
        self._stops, self._call = call.voice.stops, call
        specials = bool(call.functions) and CALLS in call.voice.tokenizer.get_added_vocab()
        self._text = TextStream(call.voice.tokenizer, call.request.sampling.stop, specials=specials)
        self._decoder = TokenDecoder(call.voice.tokenizer.backend_tokenizer, skip_special_tokens=False)
        self._shown, self.tokens, self.log_probs = 0, list[int](), list[float]()
        self._reported, self._calls = 0, list[ToolCall]()
        self._content: str | None = None
        """The text beside tool calls, once these have come."""
        self.finish: str | None = None

    def add(self, event: Event) -> None:
        """Add an event's tokens."""
        self.tokens += event.tokens
        self.log_probs += event.log_probs
        for token in event.tokens:
            if token not in self._stops:
                self._text.add(token)
        if event.finish:
            self._text.end()
        if self._text.stopped:
            self.finish = "stop"
        elif event.finish:
            self.finish = _FINISH[event.finish]
        if self.finish == "stop" and self._call.functions:
            content, self._calls = split_calls(self._text.text, self._call.functions)
            if self._calls:
                self._content, self.finish = content, "tool_calls"

    @property
    def _visible(self) -> str:
        """Return the text that is certain to be shown."""
        if self._content is not None:
            return self._content
        grows = self.finish is None and self._call.functions
        return shown_before_calls(self._text.text) if grows else self._text.text

    def choice(self, index: int) -> dict[str, Any]:
        """Return the whole answer."""
        shared = {"index": index, "finish_reason": self.finish, "logprobs": self._log_probs()}
        if not self._call.chat:
            return {**shared, "text": self._visible}
        message: dict[str, Any] = {"role": "assistant", "content": self._visible}
        if self._calls:
            message |= {"content": self._visible.strip() or None, "tool_calls": [_called(call) for call in self._calls]}
        return {**shared, "message": message}

    def chunk(self, index: int) -> dict[str, Any] | None:
        """Return the new part of the answer; None without one."""
        visible = self._visible
        new, self._shown = visible[self._shown :], max(self._shown, len(visible))
        if not new and self.finish is None:
            return None
        shared = {"index": index, "finish_reason": self.finish, "logprobs": self._log_probs()}
        if not self._call.chat:
            return {**shared, "text": new}
        delta: dict[str, Any] = {"content": new}
        if self._calls:
            delta["tool_calls"] = [{"index": number, **_called(call)} for number, call in enumerate(self._calls)]
        return {**shared, "delta": delta}

    def _log_probs(self) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens that were not reported yet."""
        if not self._call.log_probs:
            return None
        begin, self._reported = self._reported, len(self.tokens)
        texts = [self._decoder.add(token) for token in self.tokens[begin:]]  # a character is its last token's
        values = self.log_probs[begin:]
        if not self._call.chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        entries = zip(texts, values, strict=True)
        content = [{"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []} for t, v in entries]
        return {"content": content}


async def _read(http: HttpRequest) -> dict[str, Any]:
    """Return the body's object.

    Raises:
        BadRequestError: it is too large, or no JSON object.
    """
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > _LARGEST_BODY:
            raise BadRequestError(f"the body is larger than {_LARGEST_BODY / 2**20:.0f} MiB", 413)
        parts.append(part)
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _number(body: dict[str, Any], name: str, kind: Any, least: float, greatest: float) -> Any:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value <= greatest:
        raise BadRequestError(f"{name} must be a number from {least:g} to {greatest:g}, got {value!r}")
    return kind(value)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > 16
        or not all(isinstance(s, str) and 0 < len(s) < 1024 for s in stops)
    ):
        raise BadRequestError("stop must be a text or a list of at most 16 texts of fewer than 1,024 characters")
    return tuple(stops)


def _grammars(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the kinds and values of the grammars that a request gives, schemas as objects."""
    options = body.get("structured_outputs") or {}
    if not isinstance(options, dict) or options.keys() - _GRAMMARS.keys():
        raise BadRequestError(f"structured_outputs must be an object with one of: {', '.join(_GRAMMARS)}")
    given = [(f"structured_outputs.{kind}", kind, value) for kind, value in options.items()]
    given += [(f"guided_{kind}", kind, body.get(f"guided_{kind}")) for kind in _GRAMMARS]
    found = [(kind, _value(name, kind, value)) for name, kind, value in given if value is not None]
    schema = _schema(body.get("response_format") or {"type": "text"})
    return found if schema is None else [*found, ("json", schema)]


def _value(name: str, kind: str, value: Any) -> Any:
    """Return the value of a grammar, checked, with a schema read from its text."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"{name} is no JSON: {error}") from error
    texts = kind != "choice" or (isinstance(value, list) and value and all(isinstance(t, str) and t for t in value))
    type_, wanted = _GRAMMARS[kind]
    if not isinstance(value, type_) or not texts:
        raise BadRequestError(f"{name} must be {wanted}")
    return value


def _schema(wanted: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`; None for text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = wanted.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise BadRequestError(
            "response_format must have the type text, json_object, or json_schema with a name and schema in json_schema"
        )
    return described["schema"]


def _biases(body: dict[str, Any], vocabulary: int) -> dict[int, float]:
    given = body.get("logit_bias") or {}
    try:
        biases = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRequestError("logit_bias must map token ids to numbers") from error
    if not all(0 <= token < vocabulary and abs(value) <= 1e6 for token, value in biases.items()):
        raise BadRequestError(f"logit_bias must map token ids below {vocabulary} to numbers from -1e6 to 1e6")
    return biases


def _usage(call: Call, answers: list[_Answer]) -> dict[str, int]:
    prompt, new = len(call.request.prompt), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _sent(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error(message: str, status: int) -> JSONResponse:
    kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(
        status, "invalid_request_error"
    )
    readable = message.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
    return JSONResponse({"error": {"message": readable, "type": kind, "param": None, "code": None}}, status)
