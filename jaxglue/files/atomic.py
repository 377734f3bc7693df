"""Files and folders written under a name of their own, then renamed, whoever else writes them meanwhile."""

import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`, renamed to `path` on success and removed on any error.

    Raises:
        OSError: a failed write, naming `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}: {path} was not written; any previous file is unchanged"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


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


def temporary_beside(path: Path) -> Path:
    """Return a hidden name beside `path` that no other writer has, and remove those of killed writers.

    An `.old` folder of one that was killed between two renames comes back to `path`.
    """
    prefix = temporary_prefix(path)
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.\w+\.(tmp|old)")
    for entry in list(path.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if not match or entry.is_symlink() or _is_alive(int(match[1])):
            continue
        if match[2] == "old" and not path.exists():
            os.replace(entry, path)
        elif entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    return path.with_name(f"{prefix}{os.getpid()}.{secrets.token_hex(8)}.tmp")


def temporary_prefix(path: Path) -> str:
    """Return the start of temporary names, of this host and its process ids: containers may share a host's name."""
    host = socket.gethostname()
    with suppress(OSError):
        host += os.readlink("/proc/self/ns/pid")
    return f".{path.name}.{hashlib.sha256(host.encode()).hexdigest()[:8]}-"


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
