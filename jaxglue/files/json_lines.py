"""Files of one JSON object a line that a run appends to: damage in them ends no run."""

import io
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxglue.files.atomic import atomic_file, named_errors
from jaxglue.files.json_file import parse_object

DAMAGED = ".damaged"
"""Ends the name of the file that damaged lines are moved to."""
_log = logging.getLogger(__name__)


class JsonLines(NamedTuple):
    """Lines of a file."""

    intact: list[dict[str, Any]]
    damaged: list[bytes]
    """Lines that are no valid object."""
    is_cut: bool
    """True where a crash cut the last line short; neither list has it."""


def read_json_lines(path: Path, is_valid: Callable[[dict[str, Any]], bool]) -> JsonLines:
    """Read a file, or none if it is missing, with damaged lines apart."""
    lines = JsonLines([], [], False)
    content = io.BytesIO(path.read_bytes() if path.exists() else b"")
    for line in filter(bytes.strip, content):
        if not line.endswith(b"\n"):
            return lines._replace(is_cut=True)
        try:
            values = parse_object(line, str(path))
        except ValueError:
            values = {}
        if values and is_valid(values):
            lines.intact.append(values)
        else:
            lines.damaged.append(line)
    return lines


def rewrite_lines(
    path: Path, lines: Iterable[dict[str, Any]], damaged: Iterable[bytes], *, ensure_ascii: bool = True
) -> None:
    """Replace the lines of a file; append damaged ones to another beside it, and say so."""
    if found := list(damaged):
        aside = path.with_name(path.name + DAMAGED)
        with named_errors(aside), aside.open("ab") as file:
            file.writelines(found)
        _log.warning("%s: damaged lines (%d) were moved to %s; the run goes on without them", path, len(found), aside)
    with atomic_file(path) as temporary:
        temporary.write_text(
            "".join(json.dumps(line, ensure_ascii=ensure_ascii) + "\n" for line in lines), encoding="utf-8"
        )


def move_aside(path: Path, spans: Sequence[tuple[int, int]]) -> None:
    """Move lines of a file, by their first and last bytes, to another file beside it, and say so."""
    aside = path.with_name(path.name + DAMAGED)
    with (
        path.open("rb") as file,
        named_errors(aside),
        aside.open("ab") as damaged,
        atomic_file(path) as temporary,
        temporary.open("wb") as intact,
    ):
        for begin, end in spans:
            _copy(file, intact, begin - file.tell())
            _copy(file, damaged, end - begin)
        shutil.copyfileobj(file, intact)
    _log.warning("%s: damaged lines (%d) were moved to %s; the run goes on without them", path, len(spans), aside)


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        part = source.read(min(count, 1 << 20))
        target.write(part)
        count -= len(part)


def read_steps(path: Path) -> JsonLines:
    """Read a file whose lines have a whole number as `step`."""
    return read_json_lines(path, lambda line: type(line.get("step")) is int)
