"""A line in the log for each request, and what the metrics count of it."""

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxglue.serve.metrics import Metrics
from jaxglue.terminal.lines import echo

_KEY = "jaxglue.record"
_UNLOGGED = ("/health", "/metrics")
"""Addresses that are asked every few seconds."""


@dataclass
class RequestRecord:
    """What is known of a request when it ends."""

    begin: float = field(default_factory=time.monotonic)
    model: str | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token: float | None = None
    """Time of the first token of an answer, of `time.monotonic`."""
    finishes: list[str] = field(default_factory=list)
    """Why each of its answers ended."""
    ignored: list[str] = field(default_factory=list)
    """Names of parameters that do not change an answer."""
    refusal: str | None = None

    def line(self, scope: Scope, status: int) -> str:
        """Return the request's line in the log."""
        client = scope.get("client") or ("-", 0)
        parts = [f"{client[0]}:{client[1]} {scope['method']} {scope['path']} {status}"]
        parts.append(f"{time.monotonic() - self.begin:.3f} s")
        if self.first_token is not None:
            parts.append(f"first token {self.first_token - self.begin:.3f} s")
        if self.model is not None:
            parts.append(f"{self.model}: {self.prompt_tokens:,} + {self.new_tokens:,} tokens")
        if self.ignored:
            parts.append(f"ignored: {', '.join(self.ignored)}")
        if self.refusal:
            parts.append(self.refusal)
        return ", ".join(part if len(part) <= _LONGEST else part[:_LONGEST] + "…" for part in parts).replace("\n", " ")


_LONGEST = 300
"""Characters of a part of a line."""


def record_of(http: HttpRequest) -> RequestRecord:
    """Return the record of a request."""
    return http.scope.setdefault(_KEY, RequestRecord())


class Recorded:
    """Application whose requests are counted, and logged as lines on standard error."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, logs: bool):
        self._app, self._metrics, self._logs = app, metrics, logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, statuses = scope.setdefault(_KEY, RequestRecord()), list[int]()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            status = statuses[0] if statuses else 499
            self._count(scope, record, status)

    def _count(self, scope: Scope, record: RequestRecord, status: int) -> None:
        path: Any = getattr(scope.get("route"), "path", None) or "other"
        self._metrics.responses.labels(scope["method"], path, f"{status}").inc()
        if record.model is not None:
            self._metrics.end(record.model, time.monotonic() - record.begin, record.finishes)
        if self._logs and scope["path"] not in _UNLOGGED:
            echo(record.line(scope, status), error=True)
