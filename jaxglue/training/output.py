"""The folder that a run writes to: one run at a time, and none overwritten by accident."""

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxglue.distributed import Processes

_LOCK = ".jaxglue-run"
"""Marks a run folder, names its process and is locked while that lives; the system frees the lock after a crash."""
_SHARED_SECONDS = 15
"""How long another host may take to see what process 0 wrote."""


@contextlib.contextmanager
def output_folder(path: Path, *, resume: bool = False, overwrite: bool = False) -> Iterator[Path]:
    """Makes or takes over the folder of a run and holds it until the context ends.

    Args:
        path: a folder that is new or empty, or with `resume` or `overwrite` that of an earlier run.
        resume: go on with the run in it.
        overwrite: delete what the run in it wrote.

    Raises:
        ValueError: the folder is in use, holds what it should not, or lacks a run to resume.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: the one keeps what the other deletes")
    _check_contents(path, resume=resume, overwrite=overwrite)
    path.mkdir(parents=True, exist_ok=True)
    with (path / _LOCK).open("a+") as lock:
        _acquire(lock, path)
        if overwrite:
            _clear(path)
        yield path


@contextlib.contextmanager
def shared_output_folder(path: Path, processes: Processes, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """`output_folder` for a run of several processes: process 0 takes it over, and the others see that it did.

    Raises:
        ValueError: likewise, or the folder is not shared by all hosts.
    """
    with contextlib.ExitStack() as held:
        if processes.is_main:
            held.enter_context(output_folder(path, resume=resume, overwrite=overwrite))
        owner = processes.all_gather_object((path / _LOCK).read_text() if processes.is_main else None)[0]
        seen = processes.all_gather_object(_wait_for(path / _LOCK, owner))
        if missing := [str(index) for index, is_there in enumerate(seen) if not is_there]:
            raise ValueError(
                f"output folder {path} of process 0 is not that of process {', '.join(missing)}: "
                "name one on a file system that all hosts share"
            )
        yield path


def _wait_for(path: Path, content: str) -> bool:
    """Whether the file has this content, on a network file system perhaps a little later."""
    for _ in range(_SHARED_SECONDS):
        with contextlib.suppress(OSError):
            if path.read_text() == content:
                return True
        time.sleep(1)
    return False


def _check_contents(path: Path, *, resume: bool, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"output folder {path} is a file: choose another")
    is_run = (path / _LOCK).exists()
    if resume and not is_run:
        raise ValueError(f"--resume: {path} holds no run to go on with: check the folder, or start without --resume")
    if not path.exists() or resume:
        return
    others = [entry.name for entry in path.iterdir() if entry.name != _LOCK]
    if others and not is_run:
        raise ValueError(f"output folder {path} holds files of something else ({min(others)}, …): choose another")
    if others and not overwrite:
        raise ValueError(f"output folder {path} holds a run: go on with it by --resume, or delete it by --overwrite")


def _acquire(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        message = f"output folder {path} is in use by {owner}: wait for it, stop it, or choose another folder"
        raise ValueError(message) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def _clear(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()
