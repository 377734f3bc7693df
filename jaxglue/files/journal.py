"""Values on disk while a process works on them: one that is killed goes on with those that were saved."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self

_DIGEST = 16


class Journal:
    """A file of lines, of which a key's last one counts; a context that closes it.

    A line begins with a digest, so that one that a crash cut short is told from others.

    Args:
        path: of the file.
        run: what values depend on; those of others are not read.
    """

    named: ClassVar[str] = "value"
    """Field of lines that has the value."""

    def __init__(self, path: Path, run: Mapping[str, Any]):
        self._lock = Lock()
        kept = _read(path, dict(run), self.named)
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab" if kept is not None else "wb")
        if kept is None:
            self._write({"run": run})
        self.kept = kept or {}
        """Last values of an earlier process that are not loaded yet, by key."""

    def load(self, key: str) -> dict[str, Any] | None:
        """Return what was last saved under a key."""
        return self.kept.pop(key, None)

    def save(self, key: str, value: dict[str, Any]) -> None:
        """Save a value in the place of what was saved before."""
        self._write({"key": key, self.named: value})

    def _write(self, value: Mapping[str, Any]) -> None:
        body = json.dumps(value, default=float).encode()
        line = hashlib.sha256(body).hexdigest()[:_DIGEST].encode() + body + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _read(path: Path, run: dict[str, Any], named: str) -> dict[str, dict[str, Any]] | None:
    """Return the last lines of keys; None without the file, or for another run. What a crash cut short is cut."""
    if not path.is_file():
        return None
    values, first, end = dict[str, dict[str, Any]](), True, 0
    with path.open("r+b") as file:
        for line in file:
            body = line[_DIGEST:-1]
            if not line.endswith(b"\n") or hashlib.sha256(body).hexdigest()[:_DIGEST].encode() != line[:_DIGEST]:
                break
            value = json.loads(body)
            if first and value.get("run") != json.loads(json.dumps(run, default=float)):
                return None
            if not first:
                values[value["key"]] = value[named]
            first, end = False, end + len(line)
        file.truncate(end)
    return None if first else values
