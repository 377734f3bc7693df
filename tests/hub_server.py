"""A small server of the Hugging Face hub's HTTP API: repositories in folders, downloads, commits and large files."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

SHA = "0123456789abcdef0123456789abcdef01234567"
"""The only commit of every repository."""


@dataclass
class Hub:
    """A running server and its repositories."""

    url: str
    repositories: dict[str, Path]
    """Folders by kind and name, such as models/owner/name."""
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    uploads: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Committed files by repository."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Contents of large files by SHA-256, and of their parts by path, uploaded before a commit names them."""
    part_bytes: int | None = None
    """Size of a large file's parts; None uploads each whole."""

    def downloads(self) -> set[str]:
        """Return the names of the files that were asked for."""
        return {request.rpartition("/")[2] for request in self.requests if "/resolve/" in request}


def start_hub() -> tuple[Hub, ThreadingHTTPServer]:
    """Serve on a free port of this machine in a thread."""

    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.hub = Hub(f"http://127.0.0.1:{server.server_port}", {})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return Handler.hub, server


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.hub.requests.append(path)
        if match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(*match.groups())
        elif match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?", path):
            self._tree(*match.groups())
        elif match := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(match[1] or "models", match[2], match[3])
        else:
            self._error(404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.hub.requests.append(path)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self._json({"url": f"{self.hub.url}/{name}", "id": name, "name": name})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/preupload/.+", path):
            files = json.loads(body)["files"]
            self._json({"files": [{"path": f["path"], "uploadMode": _mode(f), "shouldIgnore": False} for f in files]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            self._json({"transfer": "basic", "objects": [{**each, "actions": self._actions(each)} for each in objects]})
        elif match := re.fullmatch(r"/lfs/(\w+)/(complete|verify)", path):
            self._finish_blob(match[1], json.loads(body))
        elif match := re.fullmatch(r"/api/\w+/([^/]+/[^/]+)/paths-info/.+", path):
            self._json([])
        elif match := re.fullmatch(r"/api/\w+/([^/]+/[^/]+)/commit/.+", path):
            lines = [json.loads(line) for line in body.splitlines()]
            self.hub.uploads[match[1]] = {
                line["value"]["path"]: self._content(**line) for line in lines if line["key"] != "header"
            }
            self._json({"commitUrl": f"{self.hub.url}/{match[1]}/commit/{SHA}", "commitOid": SHA, "success": True})
        else:
            self._error(404, "EntryNotFound")

    def do_PUT(self):
        """Take a large file, or a part of one."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.requests.append(self.path)
        self.hub.blobs[self.path] = content
        self._send(200, b"", {"ETag": f'"{_digest(content)}"'})

    def _actions(self, blob: dict) -> dict:
        """Return the addresses for a large file: of the whole, or of its parts and of their completion."""
        url, size = f"{self.hub.url}/lfs/{blob['oid']}", self.hub.part_bytes
        if size is None:
            return {"upload": {"href": f"{url}/1"}, "verify": {"href": f"{url}/verify"}}
        parts = {str(part): f"{url}/{part}" for part in range(1, -(-blob["size"] // size) + 1)}
        return {"upload": {"href": f"{url}/complete", "header": {"chunk_size": str(size), **parts}}}

    def _finish_blob(self, oid: str, asked: dict) -> None:
        """Join a large file's parts, and check its digest."""
        count = len(asked.get("parts", [None]))
        content = b"".join(self.hub.blobs[f"/lfs/{oid}/{part}"] for part in range(1, count + 1))
        if hashlib.sha256(content).hexdigest() != oid:
            self._error(422, "BadDigest")
            return
        self.hub.blobs[oid] = content
        self._json({})

    def _content(self, key: str, value: dict) -> bytes:
        return self.hub.blobs[value["oid"]] if key == "lfsFile" else base64.b64decode(value["content"])

    def _folder(self, kind: str, name: str) -> Path | None:
        if name in self.hub.gated:
            self._error(403, "GatedRepo")
        elif f"{kind}/{name}" not in self.hub.repositories:
            self._error(401, "RepoNotFound")
        else:
            return self.hub.repositories[f"{kind}/{name}"]
        return None

    def _info(self, kind: str, name: str, revision: str | None) -> None:
        if (folder := self._folder(kind, name)) is None:
            return
        if revision not in (None, "main", SHA):
            self._error(404, "RevisionNotFound")
            return
        siblings = [{"rfilename": path} for path in _files(folder)]
        self._json({"id": name, "sha": SHA, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def _tree(self, kind: str, name: str, under: str | None) -> None:
        if (folder := self._folder(kind, name)) is not None:
            prefix = f"{under}/" if under else ""
            found = {path: file for path, file in _files(folder).items() if path.startswith(prefix)}
            self._json([{"type": "file", "path": p, "size": len(b), "oid": _digest(b)} for p, b in found.items()])

    def _file(self, kind: str, name: str, path: str) -> None:
        if (folder := self._folder(kind, name)) is None:
            return
        if not (folder / path).is_file():
            self._error(404, "EntryNotFound")
            return
        content = (folder / path).read_bytes()
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        self._send(200, content, headers)

    def _json(self, value) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _mode(file: dict) -> str:
    return "lfs" if file["path"].endswith(".safetensors") else "regular"


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
