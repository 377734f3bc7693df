"""Writing files and folders so that nobody ever sees half of one."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`; renamed to `path` on success, removed on any error.

    Raises:
        OSError: from the writer (a full disk, …), naming `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {path} was not written; what was there before stays") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; renamed to `path` on success, removed on any error.

    Args:
        path: absent or an empty folder, unless `replace`.
        replace: whether a folder that is there is deleted once the new one is complete.

    Raises:
        ValueError: `path` exists, is not an empty folder, and may not be replaced.
        OSError: from the writer (a full disk, …), naming `path`.
    """
    if not replace:
        require_empty(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's 0o700 would lock colleagues out
        if replace and path.exists():
            os.replace(path, temporary.with_suffix(".old"))
        os.replace(temporary, path)
        shutil.rmtree(temporary.with_suffix(".old"), ignore_errors=True)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {path} was not written") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_empty(path: Path) -> None:
    """Raises ValueError unless `path` is free to be written: absent, or an empty folder."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: name a folder that does not exist yet")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty: name another folder, or empty this one first")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ValueError: not UTF-8, not JSON (with line and column), or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object, but holds a {type(content).__name__}")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` as indented JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
