"""The hub's client with its answers checked: it names files by digests and commits that a server tells it."""

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DIGESTS = ("etag", "x-linked-etag", "x-xet-hash")
_COMMIT = "x-repo-commit"
_NAMES = ("sha", "oid", "blobId", "sha256", "xetHash")
"""Keys of digests and commits in the hub's JSON."""
_PATIENCE = 10.0
"""Seconds without an answer after which a line says so."""
_log = logging.getLogger(__name__)


class UntrustedAnswerError(ValueError):
    """An answer whose digests or commits are none, and would name files anywhere."""


@contextmanager
def checked_answers() -> Iterator[None]:
    """Refuse, in the body, answers to huggingface_hub whose digests or commits are no hexadecimal ones of their length.

    A server that is silent for 10 s is named in a line.

    Raises:
        UntrustedAnswerError: such an answer, before any file is written for it.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    before, waiting = _http._GLOBAL_CLIENT_FACTORY, _Waiting()

    def factory() -> Any:
        client = before()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", ()), waiting.begin],
            "response": [waiting.end, _check, *hooks.get("response", ())],
        }
        return client

    set_client_factory(factory)
    try:
        yield
    finally:
        waiting.stop()
        set_client_factory(before)


def _check(response: Any) -> None:
    """Raise UntrustedAnswerError for headers or JSON with a digest or commit that is none."""
    if commit := response.headers.get(_COMMIT):
        _require_hex(commit, response)
    if response.request.method == "HEAD" and "/resolve/" in response.request.url.path and response.status_code < 400:
        for name in _DIGESTS:
            if value := response.headers.get(name):
                _require_hex(value.removeprefix("W/").strip('"'), response)
    if response.request.url.path.startswith("/api/") and response.status_code < 300:
        try:
            answer = json.loads(response.read())
        except (ValueError, RecursionError):
            return  # the client tells that it is no JSON
        _check_names(answer, response)


def _check_names(answer: Any, response: Any) -> None:
    """Check a repository's commit, and the digests of its files, in an answer about it or in a list of files."""
    files = answer if isinstance(answer, list) else answer.get("siblings") if isinstance(answer, dict) else None
    entries = [answer, *(files if isinstance(files, list) else ())]
    entries += [entry["lfs"] for entry in entries if isinstance(entry, dict) and "lfs" in entry]
    for entry in entries:
        for name in _NAMES if isinstance(entry, dict) else ():
            if isinstance(digest := entry.get(name), str):
                _require_hex(digest, response)


def _require_hex(value: str, response: Any) -> None:
    if not _HEX.fullmatch(value):
        raise UntrustedAnswerError(
            f"{response.request.url.host} names a commit or digest {value!r:.100}, expected 40 or 64 hexadecimal digits"
        )


class _Waiting:
    """Requests without an answer yet, each with the timer of its line."""

    def __init__(self) -> None:
        self._timers: dict[str, threading.Timer] = {}

    def begin(self, request: Any) -> None:
        """Start the timer of a request; one that is repeated starts again."""
        self.stop(str(request.url))
        timer = threading.Timer(_PATIENCE, _say_silent, [request.url.host])
        timer.daemon = True
        self._timers[str(request.url)] = timer
        timer.start()

    def end(self, response: Any) -> None:
        """Stop the timer of an answered request."""
        self.stop(str(response.request.url))

    def stop(self, *urls: str) -> None:
        """Stop the timers of some requests, or of all."""
        for url in urls or list(self._timers):
            if timer := self._timers.pop(url, None):
                timer.cancel()


def _say_silent(host: str) -> None:
    _log.warning("%s has not answered for %d s: still waiting; Ctrl-C ends", host, _PATIENCE)
