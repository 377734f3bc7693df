"""The list of files that a run wrote, kept in its folder: nothing else there is ever moved or deleted."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxglue.hf.files import named_errors
from jaxglue.training.own_lines import OwnLines, read_own_lines, rewrite_lines

MANIFEST = ".jaxglue-run.files"
"""One JSON object a line: a claimed `path`, with `files` once a folder is complete."""
_LONGEST = 4096
"""Characters of a path."""


class RunFiles:
    """The files of the run in a folder; other files in the same folders are the user's.

    Args:
        folder: of the run.
        write: False on processes that only read the list.
    """

    def __init__(self, folder: Path, *, write: bool = True):
        self._folder, self._write = folder, write
        self._files: set[str] = set()
        self._trees: set[str] = set()
        self._foreign: dict[str, set[str]] = {}
        self._lines = read_own_lines(folder / MANIFEST, _is_entry)
        for line in self._lines.intact:
            self._apply(line)

    def claim(self, path: Path) -> None:
        """List a path before it is written; all that a folder without files of the user's receives is the run's."""
        name = self._name(path)
        if path.is_dir():
            self._foreign[name] = {file for file in self.walk(path) if file not in self}
        if not self._foreign.get(name):
            self._append({"path": name})

    def seal(self, path: Path) -> None:
        """List the files of a claimed folder that is complete; files that appear in it later are the user's."""
        name = self._name(path)
        self._append({"path": name, "files": sorted(set(self.walk(path)) - self._foreign.get(name, set()))})

    def present(self) -> list[str]:
        """Return the existing files of the run, relative to its folder."""
        claimed = (name for tree in self._trees for name in (tree, *self.walk(Path(tree))))
        return sorted({name for name in (*self._files, *claimed) if _is_file(self._folder / name, self._folder)})

    def __contains__(self, name: str) -> bool:
        return name in self._files or any(name == tree or name.startswith(f"{tree}/") for tree in self._trees)

    def _name(self, path: Path) -> str:
        return path.absolute().relative_to(self._folder.absolute()).as_posix()

    def walk(self, path: Path) -> Iterator[str]:
        """Return all files below a path, relative to the run's folder."""
        for parent, _, files in os.walk(self._folder / path):
            yield from (self._name(Path(parent) / file) for file in files)

    def _append(self, line: dict) -> None:
        self._apply(line)
        if self._write:
            path = self._folder / MANIFEST
            if self._lines.damaged or self._lines.is_cut:
                rewrite_lines(path, self._lines.intact, self._lines.damaged)
                self._lines = OwnLines([], [], False)
            with named_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _apply(self, line: dict) -> None:
        self._trees.discard(line["path"])
        if "files" in line:
            self._files.update(line["files"])
        else:
            self._trees.add(line["path"])


def _is_entry(line: dict[str, Any]) -> bool:
    files = line.get("files", [])
    return isinstance(files, list) and all(map(_is_inside, [line.get("path"), *files]))


def _is_inside(name: Any) -> bool:
    """Tell whether an entry names a path below the run's folder, as `RunFiles` writes it."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST or "\0" in name:
        return False
    path = Path(name)
    return path.as_posix() == name != "." and not path.is_absolute() and ".." not in path.parts


def _is_file(path: Path, folder: Path) -> bool:
    """Tell whether a path is a file or a link, in the folder and not behind a link out of it."""
    is_file = os.path.lexists(path) and (path.is_symlink() or path.is_file())
    return is_file and path.parent.resolve().is_relative_to(folder.resolve())
