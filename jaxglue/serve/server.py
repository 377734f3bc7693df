"""OpenAI's HTTP interface to a loaded model: chat completions, completions and models, streamed or whole."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxglue.data.messages import content_texts, read_chat
from jaxglue.generation.assistant import Assistant, Voice
from jaxglue.generation.prompts import encode_prompt, render_messages
from jaxglue.generation.scheduler import Request
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.local import foreign_page
from jaxglue.serve.openai_answer import AnswerText, usage
from jaxglue.serve.openai_request import (
    CHAT,
    COMPLETION,
    BadRequestError,
    Call,
    read_biases,
    read_body,
    read_count,
    read_echo,
    read_flag,
    read_grammar,
    read_log_probs,
    read_messages,
    read_prompts,
    read_sampling,
    read_stop_tokens,
    read_tool_choice,
    read_usage,
    read_variables,
)
from jaxglue.serve.openai_responses import RESPONSE, ResponseWriter, chat_body
from jaxglue.serve.service import EndedError, Event, FullError, Service, Ticket, TooLongError, require_short
from jaxglue.text.stream import special_stops
from jaxglue.text.thinking import Thought, thought_after
from jaxglue.text.tool_calls import call_grammar, format_of, parameters_of, schemas_of
from jaxglue.vision.rows import PromptImages

_MOST_IMAGES = 16
"""Images of a request."""
_SILENCE = 15.0
"""Seconds without an event, at most."""


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
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/responses", self._guarded(self._respond), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
            Route("/health", self._health),
        ]
        handlers: dict[Any, Any] = {HTTPException: _refused, Exception: _failed}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    def _guarded(self, handler: Callable) -> Callable:
        """Return the handler behind the token, with errors as OpenAI's clients read them."""

        async def run(http: HttpRequest) -> Response:
            try:
                self._check_token(http)
                return await handler(http)
            except ClientDisconnect:  # nobody reads the answer
                return Response(status_code=499)
            except BadRequestError as error:
                return _error(str(error), error.status, error.code, error.parameter)
            except EndedError as error:
                return _error(str(error), 500)
            except FullError:
                return _error("too many requests wait: try again later", 429, "rate_limit_exceeded")
            except TooLongError as error:
                return _error(str(error), 400, "context_length_exceeded")
            except ValueError as error:
                return _error(str(error), 400)

        return run

    def _check_token(self, http: HttpRequest) -> None:
        if (wanted := self._config.api_key) is None:
            if reason := foreign_page(http.headers):
                raise BadRequestError(reason, 403)
            return
        sent = http.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")  # bytes, as they came
        spellings = {wanted.encode(errors="replace"), wanted.encode("latin-1", errors="replace")}
        if not any(hmac.compare_digest(sent, spelling) for spelling in spellings):
            message = "no or a wrong API key: send it as a bearer token"
            raise BadRequestError(message, 401, code="invalid_api_key")

    async def _health(self, _: HttpRequest) -> Response:
        failure = self._service.failure
        return _error(failure, 503) if failure else JSONResponse({"status": "ok"})

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_described(name) for name in self._voices]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name not in self._voices:
            raise self._absent(name)
        return JSONResponse(_described(name))

    def _voice(self, body: dict[str, Any]) -> tuple[str, Voice]:
        """Return the name and the voice that a request asks for: the only one, whatever it says."""
        name, (first, *others) = body.get("model"), self._voices
        if not others or name is None:
            return first, self._voices[first]
        if not isinstance(name, str) or name not in self._voices:
            raise self._absent(name)
        return name, self._voices[name]

    def _absent(self, name: Any) -> BadRequestError:
        message = f"model {name!r:.100} is not served: use one of {', '.join(self._voices)}"
        return BadRequestError(message, 404, code="model_not_found", parameter="model")

    async def _chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, await self._chat_call(await read_body(http, CHAT, sees=self._sees)))

    async def _respond(self, http: HttpRequest) -> Response:
        body = await read_body(http, RESPONSE, sees=self._sees)
        call = await self._chat_call(chat_body(body))
        answers, writer = _Answers(self._service, call), ResponseWriter(body, call)
        if call.stream:
            return _EventStream(_response_events(writer, call, answers), answers)
        await _finished(http, answers)
        (answer,) = answers.texts
        for _ in chain(writer.add(answer.choice(0)["message"]), writer.end(answer, usage(call.requests, [answer]))):
            pass
        return JSONResponse(writer.response)

    @property
    def _sees(self) -> bool:
        return self._assistant.sight is not None

    async def _chat_call(self, body: dict[str, Any]) -> Call:
        """Return a parsed chat."""
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        chat = self._assistant.attach(read_chat(read_messages(body), tools, "messages", sees=self._sees))
        if len(chat.images) > _MOST_IMAGES:
            raise BadRequestError(f"{len(chat.images)} images: at most {_MOST_IMAGES} are taken", parameter="messages")
        if self._config.system is not None:
            chat = chat.with_system(self._config.system)
        schemas, voice = schemas_of(chat.tools), self._voice(body)[1]
        if len(chat.messages) > self._service.length:  # each takes more than a token
            raise TooLongError(f"{len(chat.messages):,} messages, and texts may have {self._service.length:,} tokens")
        contents = "\n".join(chain.from_iterable(content_texts(message["content"]) for message in chat.messages))
        await asyncio.to_thread(require_short, voice.tokenizer, contents, self._service.length)
        source = str(voice.tokenizer.chat_template)
        if "developer" not in source:  # such templates would leave the message out
            chat = chat.with_developer_as_system()
        options: dict[str, Any] = {"check": True, "needs_tools": True, "variables": read_variables(body, source)}
        template, text = render_messages(voice.tokenizer, chat, **options)
        await asyncio.to_thread(require_short, voice.tokenizer, text, self._service.length)
        # Beside the streams of others.
        prompt = await asyncio.to_thread(self._assistant.encode_rendered, template, text, chat.images)
        if len(prompt.tokens) >= self._service.length:
            raise TooLongError(f"{len(prompt.tokens):,} tokens, and texts may have {self._service.length:,}")
        calls = _forced_calls(body, schemas, voice)
        answer: dict[str, Any] = {"schemas": schemas, "calls": calls, "thinks": thought_after(text)}
        return await self._call(body, [prompt.tokens], chat=True, images=prompt.images, **answer)

    async def _complete(self, http: HttpRequest) -> Response:
        body = await read_body(http, COMPLETION)
        tokenizer, encoded = self._voice(body)[1].tokenizer, list[list[int]]()
        echo = read_echo(body)
        for prompt in read_prompts(body):
            if isinstance(prompt, str):
                await asyncio.to_thread(require_short, tokenizer, prompt, self._service.length)
                prompt = await asyncio.to_thread(encode_prompt, tokenizer, prompt, raw=True)
            if not prompt:  # an empty text, which some tokenizers begin with a token
                raise BadRequestError("prompt must not be empty: this tokenizer puts no token before it")
            encoded.append(prompt)
        texts = [p if isinstance(p, str) else str(tokenizer.decode(p)) for p in read_prompts(body)] if echo else []
        return await self._answer(http, await self._call(body, encoded, chat=False, echo=texts))

    async def _call(
        self,
        body: dict[str, Any],
        prompts: list[list[int]],
        *,
        chat: bool,
        schemas: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        calls: str | None = None,
        thinks: Thought = Thought.NONE,
        echo: Sequence[str] = (),
        images: PromptImages | None = None,
    ) -> Call:
        """Return a parsed request."""
        self._requests += 1
        name, voice = self._voice(body)
        length, longest = self._service.length, max(map(len, prompts))
        defaults = self._config.sampling, max(length - longest, 1), length, self._requests
        sampling, log_probs = read_sampling(body, *defaults), read_log_probs(body, chat=chat)
        make = partial(read_grammar, body, lambda: self._assistant.grammars.of(voice.tokenizer), calls, thinks=thinks)
        vocabulary, count = self._assistant.config.vocab_size, read_count(body)
        if len(prompts) * count > max(self._config.max_requests, 1):
            message = f"{len(prompts)} prompts with {count} answers each: at most {self._config.max_requests} are taken"
            raise BadRequestError(message, parameter="n")
        special = special_stops(voice.tokenizer, sampling.stop)
        asked: dict[str, Any] = {
            "stop": {*voice.stops, *special, *read_stop_tokens(body, vocabulary)},
            "logit_bias": read_biases(body, vocabulary),
            "ranks": voice.ranks,
            "grammar": await asyncio.to_thread(make),
            "top_log_probs": log_probs or 0,
            "n": count,
            "images": images,
        }
        return Call(
            model=name,
            voice=voice,
            requests=[Request(tokens, sampling, index, **asked) for index, tokens in enumerate(prompts)],
            stream=read_flag(body, "stream") or False,
            usage=read_usage(body),
            log_probs=log_probs,
            chat=chat,
            thinks=thinks,
            echo=echo,
            functions=parameters_of(schemas),
            form=format_of(str(voice.tokenizer.get_chat_template(tools=[]))) if schemas else None,
            one_call=read_flag(body, "parallel_tool_calls") is False,
            named=isinstance(body.get("tool_choice"), dict),
        )

    async def _answer(self, http: HttpRequest, call: Call) -> Response:
        answers = _Answers(self._service, call)
        if call.stream:
            head = _head(call, stream=True)
            return _EventStream(_chunks(head, call, answers), answers)
        await _finished(http, answers)
        choices = [text.choice(index) for index, text in enumerate(answers.texts)]
        counts = usage(call.requests, answers.texts)
        return JSONResponse({**_head(call, stream=False), "choices": choices, "usage": counts})


class _Answers:
    """The answers to a call while they grow.

    Raises:
        ValueError: as `Service.submit`, before any is begun.
    """

    def __init__(self, service: Service, call: Call):
        self._service, self._tickets = service, list[Ticket]()
        self._events, self._loop = asyncio.Queue[tuple[int, Event] | None](), asyncio.get_running_loop()
        self.texts = [AnswerText(call, request) for request in call.requests for _ in range(request.n)]
        self._n = call.requests[0].n
        try:
            for index, request in enumerate(call.requests):
                self._tickets.append(service.submit(request, self._listener(index * self._n), id(self)))
        except BaseException:
            self.cancel()
            raise

    def _listener(self, first: int) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (first + event.answer, event))

        return listen

    async def progress(self) -> AsyncIterator[int]:
        """Yield the index of each answer that got text or ended, until all have ended.

        Raises:
            BadRequestError: the service has ended.
            ClientDisconnect: the client has hung up.
        """
        while any(text.finish is None for text in self.texts):
            if (news := await self._events.get()) is None:
                raise ClientDisconnect
            index, event = news
            if event.error:
                raise BadRequestError(event.error, 500)
            text = self.texts[index]
            if text.finish is None:
                text.add(event)
                if text.finish is not None and event.finish is None:
                    self._service.cancel(self._tickets[index // self._n], index % self._n)  # at a stop text
                yield index

    def leave(self) -> None:
        """End the progress: the client has hung up."""
        self._events.put_nowait(None)

    def cancel(self) -> None:
        """End what goes on."""
        for ticket in self._tickets:
            self._service.cancel(ticket)


class _EventStream(StreamingResponse):
    """Server-sent events of answers, which end with it, also before the first event."""

    def __init__(self, events: AsyncIterator[str], answers: _Answers):
        super().__init__(_with_comments(events), media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._answers.cancel()


async def _with_comments(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield events, and comments, which clients skip, while none come: proxies close connections that are silent."""
    event = None
    try:
        while True:
            event = event or asyncio.ensure_future(anext(events, None))
            if not (await asyncio.wait([event], timeout=_SILENCE))[0]:
                yield ": waiting\n\n"
            elif (text := event.result()) is None:
                return
            else:
                event = None
                yield text
    finally:
        if event:
            event.cancel()


def _forced_calls(body: dict[str, Any], schemas: Mapping[str, dict[str, Any]], voice: Voice) -> str | None:
    """Return the grammar of the calls that a chat asks for; None where the model chooses whether to call a tool."""
    if (names := read_tool_choice(body, schemas)) is None:
        return None
    several = body["tool_choice"] == "required" and read_flag(body, "parallel_tool_calls") is not False
    forced = {name: schemas[name] for name in names}
    return call_grammar(voice.tokenizer, forced, several=several)


async def _chunks(head: dict[str, Any], call: Call, answers: _Answers) -> AsyncIterator[str]:
    """Yield server-sent events."""
    if call.usage:
        head = {**head, "usage": None}
    try:
        if call.chat:
            for index in range(len(answers.texts)):
                start = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield _sent({**head, "choices": [start]})
        async for index in answers.progress():
            if chunk := answers.texts[index].chunk(index):
                yield _sent({**head, "choices": [chunk]})
        if call.usage:
            yield _sent({**head, "choices": [], "usage": usage(call.requests, answers.texts)})
        yield "data: [DONE]\n\n"
    except BadRequestError as error:
        yield _sent(_error_body(str(error), error.status))


async def _response_events(writer: ResponseWriter, call: Call, answers: _Answers) -> AsyncIterator[str]:
    """Yield server-sent events of a response."""
    (answer,) = answers.texts
    try:
        for event in writer.begin():
            yield _sent(event, event["type"])
        async for _ in answers.progress():
            if chunk := answer.chunk(0):
                for event in writer.add(chunk["delta"]):
                    yield _sent(event, event["type"])
        for event in writer.end(answer, usage(call.requests, [answer])):
            yield _sent(event, event["type"])
    except BadRequestError as error:
        yield _sent(_error_body(str(error), error.status), "error")


async def _finished(http: HttpRequest, answers: _Answers) -> None:
    """Wait for answers, unless the client hangs up."""
    hung_up = asyncio.create_task(_hang_up(http, answers))
    try:
        async for _ in answers.progress():
            pass
    finally:
        hung_up.cancel()
        answers.cancel()


async def _hang_up(http: HttpRequest, answers: _Answers) -> None:
    """Wait until the client hangs up, and leave the answers: none of them may have a slot, and so any news."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    answers.leave()


def _head(call: Call, *, stream: bool) -> dict[str, Any]:
    kind = "chat.completion" + ".chunk" * stream if call.chat else "text_completion"
    name = ("chatcmpl-" if call.chat else "cmpl-") + uuid.uuid4().hex
    return {"id": name, "object": kind, "created": int(time.time()), "model": call.model}


def _described(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "jaxglue"}


def _sent(value: dict[str, Any], kind: str | None = None) -> str:
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def _error_body(message: str, status: int, code: str | None = None, parameter: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    readable = [text and text.encode(errors="backslashreplace").decode() for text in (message, parameter)]
    return {"error": {"message": readable[0], "type": kind, "param": readable[1], "code": code}}


def _error(message: str, status: int, code: str | None = None, parameter: str | None = None) -> JSONResponse:
    """Return an error as OpenAI's clients read it; texts may quote half of a surrogate pair."""
    return JSONResponse(_error_body(message, status, code, parameter), status)


async def _refused(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path} is not served: {error.detail}"
    response = _error(message, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _failed(_: HttpRequest, __: Exception) -> Response:
    return _error("an error of the server, which its log shows", 500)
