"""Atomic writes of folders, and errors that name them."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxglue.atomic import atomic_file, temporary_beside

MAX_SHARD_BYTES = 5 * 10**9
"""Default size of a model folder's shards in bytes, as in transformers."""


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Name `path` in the OSError of a write: those of open files name none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {path} could not be written") from error


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, renamed to `path` on success and removed on any error.

    Remains of killed processes are removed first.

    Args:
        path: absent or empty, unless `replace`.
        replace: delete an existing folder once the new one is complete.

    Raises:
        ValueError: `path` is neither absent nor empty and `replace` is false.
        OSError: a failed write, naming `path`.
    """
    if not replace:
        require_empty(path)
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        temporary.mkdir()
    try:
        yield temporary
        if replace and path.exists():
            os.replace(path, temporary.with_suffix(".old"))
        os.replace(temporary, path)
        shutil.rmtree(temporary.with_suffix(".old"), ignore_errors=True)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {path} was not written") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_empty(path: Path) -> None:
    """Raise ValueError unless `path` is absent or an empty folder."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: name a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty: name another folder, or empty this one first")


def refuse_link_out(path: Path, folder: Path) -> None:
    """Raise ValueError for a link out of its folder, but for those of Hugging Face's cache into its blobs."""
    target, blobs = path.resolve(), folder.resolve().parent.parent / "blobs"
    if path.is_symlink() and target.parent != blobs and not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to {target}, outside its folder: copy the file there first")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
