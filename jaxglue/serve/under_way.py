"""Answers under way: tokens of the service's thread as texts in the server's loop, streamed or awaited."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from jaxglue.serve.answer_text import AnswerText
from jaxglue.serve.call import Call
from jaxglue.serve.host import Host
from jaxglue.serve.record import record_of
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.service import Event, Ticket

SILENCE = 15.0
"""Seconds without an event in a stream, at most."""


class Answers:
    """The answers to a call while they grow.

    Raises:
        ValueError: as `Service.submit`, before any is begun.
    """

    def __init__(self, host: Host, http: HttpRequest, call: Call):
        self._service, self._metrics, self._tickets = host.service, host.metrics, list[Ticket]()
        self._record, self._last = record_of(http), dict[int, float]()
        """Of the log; when tokens of each answer came last."""
        self._events, self._loop = asyncio.Queue[tuple[int, Event] | None](), asyncio.get_running_loop()
        self.texts = [AnswerText(call, request) for request in call.requests for _ in range(request.n)]
        self._n = call.requests[0].n
        for text in self.texts if call.empty else ():
            text.add(Event(0, [], [], "length"))
        try:
            for index, request in enumerate(() if call.empty else call.requests):
                self._tickets.append(self._service.submit(request, self._listener(index * self._n), id(self)))
        except BaseException:
            self.cancel()
            raise
        lengths = [len(request.prompt) for request in call.requests]
        self._record.model, self._record.prompt_tokens = call.model, sum(lengths)
        self._metrics.begin(call.model, lengths)

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
        for index in range(len(self.texts)) if not self._tickets else ():
            yield index
        while any(text.finish is None for text in self.texts):
            came = [await self._events.get()]
            while not self._events.empty():  # of further windows, where the loop is late: they are sent together
                came.append(self._events.get_nowait())
            for index in dict.fromkeys(index for index, event in filter(None, came) if self._add(index, event)):
                yield index
            if None in came:
                raise ClientDisconnect
            if error := next((event.error for _, event in filter(None, came) if event.error), None):
                raise BadRequestError(error, 500)

    def _add(self, index: int, event: Event) -> bool:
        """Add an event to its answer; return whether this had not ended."""
        text = self.texts[index]
        if event.error or text.finish is not None:
            return False
        self._note(index, text.add(event), text.finish)
        if text.finish is not None and event.finish is None:
            self._service.cancel(self._tickets[index // self._n], index % self._n)  # at a stop text
        return True

    def _note(self, index: int, tokens: int, finish: str | None) -> None:
        """Count an answer's new tokens for the log and the metrics."""
        record, now = self._record, time.monotonic()
        assert record.model is not None
        if record.first_token is None:
            record.first_token = now
            self._metrics.first(record.model, now - record.begin)
        self._metrics.add(record.model, tokens, now - self._last[index] if index in self._last else None)
        self._last[index] = now
        record.new_tokens += tokens
        if finish is not None:
            record.finishes.append(finish)
            self._metrics.draft(record.model, *self.texts[index].drafts)

    async def finish(self, http: HttpRequest) -> None:
        """Wait for the answers, unless the client hangs up; errors as of `progress`."""
        with self.listening(http.receive):
            async for _ in self.progress():
                pass

    @contextmanager
    def listening(self, receive: Receive) -> Iterator[None]:
        """End the progress where the client hangs up, and with the context the answers."""
        hung_up = asyncio.create_task(self._hang_up(receive))
        try:
            yield
        finally:
            hung_up.cancel()
            self.cancel()

    async def _hang_up(self, receive: Receive) -> None:
        """Wait until the client hangs up, and end the progress: no answer may have a slot, and so any news."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)

    def cancel(self) -> None:
        """End what goes on."""
        for ticket in self._tickets:
            self._service.cancel(ticket)


class EventStream(StreamingResponse):
    """Server-sent events of answers, which end with it, also before the first event."""

    def __init__(self, events: AsyncIterator[str], answers: Answers):
        super().__init__(events, media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, unless the client hangs up."""
        with self._answers.listening(receive), suppress(ClientDisconnect):
            await self.stream_response(send)

    async def stream_response(self, send: Send) -> None:
        """Send the events, and comments, which clients skip, while none come: proxies close silent connections."""
        one_at_a_time, last = asyncio.Lock(), time.monotonic()

        async def send_next(message: Message) -> None:
            nonlocal last
            async with one_at_a_time:
                await send(message)
                last = time.monotonic()

        async def comment() -> None:
            nonlocal last
            while True:
                await asyncio.sleep(max(last + SILENCE - time.monotonic(), 0.0))
                async with one_at_a_time:
                    if time.monotonic() >= last + SILENCE:  # still, and not as the stream has ended meanwhile
                        await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                        last = time.monotonic()

        comments = asyncio.create_task(comment())
        try:
            await super().stream_response(send_next)
        finally:
            comments.cancel()


def sent(value: dict[str, Any], kind: str | None = None) -> str:
    """Return a server-sent event, with the name of its kind if it has one."""
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"
