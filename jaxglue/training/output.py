"""The output folder of a run: locked while the run lives, never overwritten by accident."""

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from jaxglue.distributed import Processes
from jaxglue.hf.files import named_errors
from jaxglue.training.own_lines import DAMAGED
from jaxglue.training.previous_run import ASIDE, recover
from jaxglue.training.run_files import MANIFEST, RunFiles

_OWNER = ".jaxglue-run"
"""Marks a run folder and names its latest process."""
_LOCK = ".jaxglue-run.lock"
"""Locked while that process lives; the system frees it after a crash."""
_WRITTEN = (
    *("config.toml", "metrics.jsonl", "samples.jsonl", "summary.json", "trackers.json", "loss.png"),
    *("adapter", "adapter-last", "base", "model", "model-last", "checkpoints", "profile"),
    *("tensorboard", "wandb", "trackio", "mlflow"),
    *(_OWNER, _LOCK, MANIFEST),
)
"""Everything that a run writes at the top of its folder."""
_REPLACED_WHOLE = ("base", "checkpoints", "model", "model-last")
"""Folders in which a run deletes and replaces folders."""
_SHARED_SECONDS = 15
"""Time for another host to see a file of process 0."""


@contextlib.contextmanager
def output_folder(path: Path, *, resume: bool = False, overwrite: bool = False) -> Iterator[Path]:
    """Create or take over the folder of a run and lock it until the context ends.

    Args:
        path: a new or empty folder, or with `resume` or `overwrite` the folder of an earlier run.
        resume: continue its run.
        overwrite: its run is to be replaced (see `previous_run`); nothing is moved or deleted here.

    Raises:
        ValueError: the folder is in use, holds files of something else or symbolic links, or lacks a run to resume.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: leave one out")
    _check_contents(path, resume=resume, overwrite=overwrite)
    _check_links(path)
    with named_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        recover(path)
        if overwrite:
            _check_replaceable(path)
        with named_errors(path / _OWNER):
            (path / _OWNER).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield path


@contextlib.contextmanager
def shared_output_folder(path: Path, processes: Processes, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Hold `output_folder` for several processes: process 0 locks it, the others check that they see the same.

    Raises:
        ValueError: like `output_folder`, or the hosts do not share the folder.
    """
    with contextlib.ExitStack() as held:
        if processes.is_main:
            held.enter_context(output_folder(path, resume=resume, overwrite=overwrite))
        owner = processes.all_gather_object((path / _OWNER).read_text() if processes.is_main else None)[0]
        seen = processes.all_gather_object(_wait_for(path / _OWNER, owner))
        if missing := [str(index) for index, is_there in enumerate(seen) if not is_there]:
            raise ValueError(
                f"output folder {path} of process 0 is invisible to process {', '.join(missing)}: "
                "choose one on a file system that all hosts share"
            )
        yield path


def _wait_for(path: Path, content: str) -> bool:
    """Wait until a file has this content, which a network file system may delay; False if it never has."""
    for _ in range(_SHARED_SECONDS):
        with contextlib.suppress(OSError):
            if path.read_text() == content:
                return True
        time.sleep(1)
    return False


def _check_contents(path: Path, *, resume: bool, overwrite: bool) -> None:
    if (path.exists() or path.is_symlink()) and not path.is_dir():
        raise ValueError(f"output folder {path} is a file, or a link to nothing: choose another")
    is_run = (path / _OWNER).exists()
    if resume and not is_run:
        raise ValueError(f"--resume: {path} holds no run to continue: check the folder, or start without --resume")
    if not path.exists() or resume:
        return
    others = [entry.name for entry in path.iterdir() if entry.name not in (_OWNER, _LOCK, MANIFEST)]
    if others and not is_run:
        raise ValueError(f"output folder {path} holds files of something else ({min(others)}, …): choose another")
    if others and not overwrite:
        raise ValueError(f"output folder {path} holds a run: continue it with --resume, or replace it with --overwrite")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        lock = FileLock(path / _LOCK).acquire(blocking=False)
    except Timeout:
        owner = (path / _OWNER).read_text().strip() if (path / _OWNER).exists() else "another process"
        message = f"output folder {path} is in use by {owner}: wait for it, stop it, or choose another folder"
        raise ValueError(message) from None
    with lock:
        yield


def _check_links(path: Path) -> None:
    """Refuse symbolic links where a run writes: their targets are not the run's."""
    names = [form.format(name) for name in _WRITTEN for form in ("{}", ".{}.tmp", "{}" + DAMAGED)]
    for entry in filter(os.path.lexists, (*(path / name for name in names), *path.glob(f"{ASIDE}*"))):
        within = (Path(parent, name) for parent, *names in os.walk(entry) for name in (*names[0], *names[1]))
        if link := next((link for link in (entry, *within) if link.is_symlink()), None):
            raise ValueError(
                f"{link} is a symbolic link, and a run writes through none inside its folder: remove it, "
                "or link the output folder itself"
            )


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a run of unknown files, or one among whose files are others."""
    others = [entry.name for entry in path.iterdir() if entry.name in _WRITTEN[:-3]]
    if others and not (path / MANIFEST).exists():
        raise ValueError(f"--overwrite: {path} has no list of the files that its run wrote: delete it by hand")
    files = RunFiles(path)
    for entry in (path / name for name in _REPLACED_WHOLE):
        foreign = [name for name in files.walk(entry) if name not in files and ".orbax-checkpoint-tmp/" not in name]
        if foreign:
            raise ValueError(f"--overwrite: {path / min(foreign)} was not written by the run there: move it elsewhere")


def check_inputs(path: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ValueError for an input that belongs to the run that `--overwrite` replaces."""
    folder, files = path.resolve(), RunFiles(path).present()
    for given in inputs:
        resolved = Path(given).resolve()
        if resolved.is_relative_to(folder) and any((folder / name).is_relative_to(resolved) for name in files):
            raise ValueError(f"--overwrite would delete {given}, which this run reads: choose another --output")
