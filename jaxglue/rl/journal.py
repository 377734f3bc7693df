"""Episodes on disk while a generation is under way: a run that is killed goes on with those that had ended, and in the
middle of those whose environments can say their state."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Self

EPISODES = ".episodes.jsonl"
"""Ends the name of such a file."""
_DIGEST = 16
_log = logging.getLogger(__name__)


class EpisodeFile:
    """A file of lines, of which an episode's last one counts; a context that closes it.

    A line begins with a digest, so that one that a crash cut short is told from others.

    Args:
        path: of the file.
        run: what episodes depend on; those of others are not read.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]):
        self._path, self._lock = path, Lock()
        self._kept = _read(path, dict(run))
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab" if self._kept is not None else "wb")
        if self._kept is None:
            self._write({"run": run})
            self._kept = {}
        elif self._kept:
            ended = sum("sample" in episode for episode in self._kept.values())
            _log.warning(
                "of the episodes under way when the run ended, %d had ended and %d go on from their turn; all others "
                "start again",
                *(ended, len(self._kept) - ended),
            )

    def load(self, key: str) -> dict[str, Any] | None:
        """Return what was last saved of an episode."""
        assert self._kept is not None
        return self._kept.pop(key, None)

    def save(self, key: str, value: dict[str, Any]) -> None:
        """Save an episode in the place of what was saved before."""
        self._write({"key": key, "episode": value})

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


def _read(path: Path, run: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Return the last lines of episodes; None without the file, or for another run. What a crash cut short is cut."""
    if not path.is_file():
        return None
    episodes, first, end = dict[str, dict[str, Any]](), True, 0
    with path.open("r+b") as file:
        for line in file:
            body = line[_DIGEST:-1]
            if not line.endswith(b"\n") or hashlib.sha256(body).hexdigest()[:_DIGEST].encode() != line[:_DIGEST]:
                break
            value = json.loads(body)
            if first and value.get("run") != json.loads(json.dumps(run, default=float)):
                return None
            if not first:
                episodes[value["key"]] = value["episode"]
            first, end = False, end + len(line)
        file.truncate(end)
    return None if first else episodes
