"""The page's server: on this machine alone, for whoever has its token."""

import hmac
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jaxglue.ui.page import script, skeleton, style, to_json
from jaxglue.ui.run_files import read_run, version_of

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
"""Names of this machine in a request: another one means that some page's name was pointed here."""
_LARGEST = 2**16
_TIMEOUT = 30
"""Seconds in which a request must arrive."""
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
_HEAD = '<link rel="stylesheet" href="/style.css">\n<script src="/page.js"></script>'

Answer = Callable[[Path, Mapping[str, Any]], dict[str, Any]]
"""Answer to a question about a run: of its folder and the request's fields; raises ValueError for one it refuses."""


class PageServer(ThreadingHTTPServer):
    """Serves the page of some runs.

    Args:
        runs: their folders.
        port: to listen at; 0 takes a free one.
        answers: further questions that panels ask, by name.

    Raises:
        OSError: the port is taken.
        ValueError: a folder holds no run.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int, answers: Mapping[str, Answer]):
        self.folders = {str(folder): folder for folder in runs}
        self.answers, self.token = answers, secrets.token_urlsafe(24)
        for folder in runs:
            read_run(folder)
        super().__init__((HOST, port), _Request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a page that was closed in the middle of an answer alone; report everything else."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """Return the page's address with its token."""
        return f"http://{HOST}:{self.server_address[1]}/?token={self.token}"

    def runs(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """Return all runs where one differs from these versions, else nothing."""
        if all(versions.get(name) == version_of(folder) for name, folder in self.folders.items()):
            return {}
        return {"runs": [read_run(folder).as_json() for folder in self.folders.values()]}


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        """Send a part of the page; none holds anything of a run."""
        parts = {"/": ("text/html", lambda: skeleton(_HEAD)), "/page.js": ("text/javascript", script)}
        parts["/style.css"] = ("text/css", style)
        path = self.path.partition("?")[0]
        if not self._is_local():
            self._send(403, "text/plain", "jaxglue ui answers to names of this machine alone")
        elif path not in parts:
            self._send(404, "text/plain", "no such part of the page")
        else:
            kind, read = parts[path]
            self._send(200, kind, read())

    def do_POST(self) -> None:
        """Answer a panel's question."""
        name = self.path.removeprefix("/")
        if not self._is_local() or not self._has_token():
            return self._send(403, "text/plain", "open the page by the address that jaxglue ui printed")
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return self._send(411, "text/plain", "a request needs its length")
        if not 0 <= length <= _LARGEST:
            return self._send(413, "text/plain", f"a request has at most {_LARGEST:,} bytes")
        try:
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict):
                raise ValueError("expected an object")
            self._send(200, "application/json", to_json(self._answer(name, body)))
        except (ValueError, RecursionError) as error:
            self._send(400, "text/plain", str(error))

    def _answer(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name == "runs":
            versions = body.get("versions")
            return self.server.runs(versions if isinstance(versions, dict) else {})
        if name not in self.server.answers:
            raise ValueError(f"no question named {name:.40}")
        if (folder := self.server.folders.get(str(body.get("run")))) is None:
            raise ValueError("this page shows no such run")
        return self.server.answers[name](folder, body)

    def _is_local(self) -> bool:
        return self.headers.get("Host", "") in {f"{name}:{self.server.server_address[1]}" for name in _NAMES}

    def _has_token(self) -> bool:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        headers |= {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        headers |= {"Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal may be the one that trains."""
