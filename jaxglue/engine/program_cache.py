"""The folder of compiled programs and of XLA's measured choices of algorithms.

Runs that start together execute the same programs. Damaged ones are replaced; damaged choices, which XLA would take as
they are and then choose others or fail, are measured again.
"""

import contextlib
import functools
import importlib
import json
import logging
import re
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout

from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_file import read_json
from jaxglue.files.regular_file import file_digest

_BEGIN = "/jax/compilation_cache/compile_requests_use_cache"
"""Event before a program is read from the folder."""
COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event after it was read, or compiled and written, in the same thread."""
_LOCK = ".jaxglue.lock"
_PATIENCE, _LONGEST = 5.0, 25.0
"""Seconds of waiting before it is said, and further ones at most: long enough for one program of a small run."""
_ERROR = re.compile(r"Error (reading|writing) persistent compilation cache entry for .*?: (.*)", re.DOTALL)
_UNKEPT = "compiled programs cannot be kept, so that a resumed run compiles again and may round differently: "
FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"
"""JAX's name of XLA's choices, in the folder of the compiled programs."""
_DIGESTS = ".jaxglue.tuned.json"
_log = logging.getLogger(__name__)


def keep_programs(folder: Path, *, take_turns: bool = True) -> None:
    """Keep compiled programs and kernels in a folder for later processes, or where JAX already keeps them.

    Args:
        folder: on a local disk.
        take_turns: compile no program while another process does, but wait and read its. Matmuls are tuned by
            measurement, so that two compilations may round differently, and only the first is kept for a resumed run.
            Processes of one run wait for each other while they compile, and must not.
    """
    try:
        directory = jax.config.jax_compilation_cache_dir or str(folder.expanduser())
    except RuntimeError:  # an unknown user, as in some containers
        _log.warning("compiled programs are not kept: there is no home folder (HOME): name a --compilation-cache")
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # JAX's other compressors write no checksum, so that a flipped bit would be another program.
    compressors: Any = importlib.import_module("jax._src.compilation_cache")
    compressors.zstd = compressors.zstandard = None
    check_tuning(Path(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # dozens of short ones take seconds
    _turns().take = take_turns


class _Turns:
    """Lock on the folder, held while any thread of this process reads, compiles or writes a program."""

    def __init__(self) -> None:
        self.take, self._said = False, False
        self._guard, self._threads = threading.Lock(), set[int]()
        self._lock: FileLock | None = None
        jax.monitoring.register_event_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)

    def _begin(self, event: str, **_: Any) -> None:
        folder = jax.config.jax_compilation_cache_dir
        if event != _BEGIN or not self.take or not folder or "://" in folder:
            return
        with self._guard:
            self._lock = self._lock or self._acquire(Path(folder))
            self._threads.add(threading.get_ident())

    def _end(self, event: str, duration_secs: float, **_: Any) -> None:
        if event != COMPILED:
            return
        with self._guard:
            self._threads.discard(threading.get_ident())
            if self._lock and not self._threads:
                note_tuning(Path(self._lock.lock_file).parent)
                self._lock.release()
                self._lock = None

    def _acquire(self, folder: Path) -> FileLock | None:
        """Wait for the lock; None where the folder has none, or another process never frees it."""
        lock = FileLock(folder / _LOCK, thread_local=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=_PATIENCE, poll_interval=0.02)
                return lock
            if not self._said:
                _log.warning(
                    "waiting for another process that compiles programs into %s: one does at a time, so that runs that "
                    "share it execute the same ones; a --compilation-cache of its own avoids the wait",
                    folder,
                )
                self._said = True
            lock.acquire(timeout=_LONGEST)
            return lock
        except Timeout:
            self.take = False
            _log.warning(
                "%s: another process has compiled for %.0f s; this one goes on, and once resumed may round differently "
                "(a --compilation-cache of its own prevents that)",
                folder,
                _LONGEST,
            )
        except (OSError, NotImplementedError):  # a folder that cannot be locked is rarely one that is written to
            self.take = False
        return None


@functools.cache
def _turns() -> _Turns:
    """Return this process's lock, which listens from the first call on."""
    return _Turns()


def explain_cache_errors() -> None:
    """Replace JAX's warnings about the folder of programs, one for each program, by one line; remove damaged ones."""
    show, said = warnings.showwarning, set()

    def explain(message: Warning | str, *args: Any, **options: Any) -> None:
        match = _ERROR.match(str(message))
        if not match:
            return show(message, *args, **options)
        act, reason = match.groups()
        line = _mend(Path(jax.config.jax_compilation_cache_dir or ""), reason) if act == "reading" else _UNKEPT + reason
        if act not in said:
            said.add(act)
            _log.warning("%s: %s", jax.config.jax_compilation_cache_dir, line)

    warnings.showwarning = explain


def _mend(folder: Path, reason: str) -> str:
    """Remove damaged programs, which JAX would never overwrite, and warn of them."""
    damaged = [path for path in folder.glob("*-cache") if _is_damaged(path)]
    for path in damaged:
        path.unlink(missing_ok=True)
    if not folder.is_dir():
        return _UNKEPT + reason
    if not damaged:
        return f"a compiled program cannot be read: {reason}. Delete the folder if this comes again"
    return f"removed damaged programs ({len(damaged)}), as a killed process leaves: they are compiled again"


def _is_damaged(path: Path) -> bool:
    try:
        zlib.decompress(path.read_bytes())
    except OSError:
        return False
    except zlib.error:
        return True
    return False


def check_tuning(cache: Path) -> None:
    """Remove choices that differ from their noted digests, and note the others."""
    try:
        if (cache / FOLDER).is_file():
            (cache / FOLDER).unlink()
            _log.warning("%s: removed a file in the place of a folder", cache / FOLDER)
        noted = _read_digests(cache / _DIGESTS)
        digests = {path: file_digest(path) for path in _choices(cache)}
        damaged = [path for path, digest in digests.items() if noted.get(_choice_name(path, cache), digest) != digest]
        for path in damaged:
            path.unlink(missing_ok=True)
        if damaged:
            _log.warning("%s: removed damaged choices of algorithms (%d): measured again", cache, len(damaged))
    except OSError:  # no folder yet, or one that is only read
        return
    note_tuning(cache)


def note_tuning(cache: Path) -> None:
    """Note the digests of new choices, and forget those of removed ones."""
    try:
        before = _read_digests(cache / _DIGESTS)
        names = {_choice_name(path, cache): path for path in _choices(cache)}
        noted = {name: before.get(name) or file_digest(path) for name, path in names.items()}
        if noted != before:
            with atomic_file(cache / _DIGESTS) as temporary:
                temporary.write_text(json.dumps(noted))
    except OSError:
        return


def _choices(cache: Path) -> list[Path]:
    return [path for path in (cache / FOLDER).rglob("*") if path.is_file()]


def _choice_name(path: Path, cache: Path) -> str:
    return path.relative_to(cache / FOLDER).as_posix()


def _read_digests(path: Path) -> dict[str, object]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
