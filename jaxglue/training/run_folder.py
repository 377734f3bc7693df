"""The folder of a run: locked while the run lives, its files listed, the run before kept until it is replaced."""

import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.files.atomic import atomic_file, named_errors
from jaxglue.files.json_file import write_json
from jaxglue.files.json_lines import DAMAGED, JsonLines, read_json_lines, rewrite_lines

MANIFEST = ".jaxglue-run.files"
"""One JSON object a line: a claimed `path`, with `files` once a folder is complete."""
_OWNER = ".jaxglue-run"
"""Marks a run folder and names its latest process."""
_LOCK = ".jaxglue-run.lock"
"""Locked while that process lives; the system frees it after a crash."""
_FILES = (
    *("config.toml", "metrics.jsonl", "samples.jsonl", "summary.json", "trackers.json", "loss.png"),
    *("rollouts.jsonl", "rollouts", "plan.json", "run.html"),
)
_WRITTEN = (
    *_FILES,
    *("adapter", "adapter-last", "base", "model", "model-last", "checkpoints", "profile"),
    *("tensorboard", "wandb", "trackio", "mlflow"),
    *(_OWNER, _LOCK, MANIFEST),
)
"""Everything that a run writes at the top of its folder."""
_REPLACED_WHOLE = ("base", "checkpoints", "model", "model-last")
"""Folders in which a run deletes and replaces folders."""
_SHARED_SECONDS = 15
"""Time for another host to see a file of process 0."""
_LINES = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl", MANIFEST)
_LONGEST = 4096
"""Characters of a path."""
ASIDE = ".jaxglue-old-"
"""Begins the name of the folder with the files of the run before."""
_MOVING = ".moving"
"""Ends it until all are in it."""
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def output_folder(path: Path, *, resume: bool = False, overwrite: bool = False) -> Iterator[Path]:
    """Create or take over the folder of a run and lock it until the context ends.

    Args:
        path: a new or empty folder, or with `resume` or `overwrite` the folder of an earlier run.
        resume: continue its run.
        overwrite: its run is to be replaced (see `RunFolder.replacing`); nothing is moved or deleted here.

    Raises:
        ValueError: the folder cannot be made or written, is in use, holds files of something else or symbolic links, or
            lacks a run to resume.
    """
    _check_contents(path, resume=resume, overwrite=overwrite)
    with named_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        recover(path)
        if overwrite:
            _check_replaceable(path)
        with named_errors(path / _OWNER):
            (path / _OWNER).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield path


def check_output(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise ValueError where `output_folder` would; change nothing."""
    _check_contents(path, resume=resume, overwrite=overwrite)
    if overwrite and path.is_dir() and not is_replaced(path):
        _check_replaceable(path)


def warn_of_full_disk(path: Path, checkpoint: int) -> None:
    """Warn where the disk of an output folder has less room than a checkpoint of so many bytes takes."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if (free := shutil.disk_usage(folder).free) < checkpoint:
        _log.warning(
            "a checkpoint takes up to %.1f GB, and %s has %.1f GB free: make room, or name an --output on another disk",
            *(checkpoint / 1e9, folder, free / 1e9),
        )


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
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: leave one out")
    if (path.exists() or path.is_symlink()) and not path.is_dir():
        raise ValueError(f"output folder {path} is a file, or a link to nothing: choose another")
    nearest = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        raise ValueError(f"output folder {path} cannot be made, as {nearest} is a file: choose another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"output folder {path} cannot be written, for lack of permission in {nearest}: choose another")
    _check_links(path)
    if (path / _LOCK).exists():
        with _locked(path):
            pass
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
    names = [form.format(name) for name in _WRITTEN for form in ("{}", "{}" + DAMAGED)]
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
    for folder in _REPLACED_WHOLE:
        if folder in files.unlisted:
            continue
        foreign = [name for name in files.walk(folder) if name not in files and ".orbax-checkpoint-tmp/" not in name]
        if foreign:
            raise ValueError(f"--overwrite: {path / min(foreign)} was not written by the run there: move it elsewhere")


def check_inputs(path: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ValueError for an input that belongs to the run that `--overwrite` replaces."""
    folder, files = path.resolve(), RunFiles(path).present()
    for given in inputs:
        resolved = Path(given).resolve()
        if resolved.is_relative_to(folder) and any((folder / name).is_relative_to(resolved) for name in files):
            raise ValueError(f"--overwrite would delete {given}, which this run reads: choose another --output")


class RunFolder:
    """Folder of a run; nothing is written to it before `begin`.

    Args:
        path: locked by `output_folder`.
        overwrite: replace its run.
        processes: of the run; process 0 writes.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, processes: Processes = SINGLE_PROCESS):
        self.path, self._overwrite, self._processes = path, overwrite, processes
        self._is_aside = False
        """The run before was moved."""
        self._files = RunFiles(path, write=processes.is_main)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Move the run before aside; it comes back if an error ends the context before the first checkpoint.

        A second context of the same run goes on with the first one's files.
        """
        if not self._overwrite:
            yield
            return
        if not self._is_aside:
            with self._processes.main_process_first():
                if self._processes.is_main:
                    set_aside(self.path)
            self._files, self._is_aside = RunFiles(self.path, write=self._processes.is_main), True
        try:
            yield
        except BaseException:
            if self._overwrite and self._processes.is_main and is_replaced(self.path):
                restore_previous(self.path)
                _log.warning(
                    "%s holds the run again that this one was to replace: --resume would continue it", self.path
                )
            raise

    def begin(self, recipe: str, plan: dict[str, list[list[str]]]) -> None:
        """List the files of a run that trains, and write its recipe to `config.toml` and its plan to `plan.json`."""
        if not self._processes.is_main:
            return
        for name in (*_FILES, *(name + DAMAGED for name in _LINES)):
            self._files.claim(self.path / name)
        write_json(self.path / "plan.json", plan)
        with atomic_file(self.path / "config.toml") as temporary:
            temporary.write_text(recipe, encoding="utf-8")

    @contextlib.contextmanager
    def writing(self, *names: str) -> Iterator[None]:
        """List the folders of these names, which the context fills."""
        for name in names:
            self._claim(self.path / name)
        try:
            yield
        finally:
            for name in names:
                self._seal(self.path / name)

    def before_checkpoint(self, folder: Path) -> None:
        """List a checkpoint's folder before it is written."""
        self._claim(folder)

    def checkpoint_saved(self, folder: Path) -> None:
        """List a checkpoint's files; the first one replaces the run before."""
        self._seal(folder)
        if self._overwrite and self._processes.is_main:
            discard_previous(self.path)
        self._overwrite = False

    def _claim(self, path: Path) -> None:
        if self._processes.is_main:
            self._files.claim(path)

    def _seal(self, path: Path) -> None:
        if self._processes.is_main:
            self._files.seal(path)


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
        self.unlisted: set[str] = set()
        """Folders whose list is empty; version 0.1.0 wrote such ones in relative output folders."""
        self._lines = read_json_lines(folder / MANIFEST, _is_entry)
        for line in self._lines.intact:
            self._apply(line)

    def claim(self, path: Path) -> None:
        """List a path before it is written; all that a folder without files of the user's receives is the run's."""
        name = self._name(path)
        if path.is_dir():
            self._foreign[name] = {file for file in self.walk(name) if file not in self}
        if not self._foreign.get(name):
            self._append({"path": name})

    def seal(self, path: Path) -> None:
        """List the files of a claimed folder that is complete; files that appear in it later are the user's."""
        name = self._name(path)
        self._append({"path": name, "files": sorted(set(self.walk(name)) - self._foreign.get(name, set()))})

    def present(self) -> list[str]:
        """Return the existing files of the run, relative to its folder."""
        claimed = (name for tree in self._trees for name in (tree, *self.walk(tree)))
        return sorted({name for name in (*self._files, *claimed) if _is_file(self._folder / name, self._folder)})

    def __contains__(self, name: str) -> bool:
        return name in self._files or any(name == tree or name.startswith(f"{tree}/") for tree in self._trees)

    def _name(self, path: Path) -> str:
        return path.absolute().relative_to(self._folder.absolute()).as_posix()

    def walk(self, name: str) -> Iterator[str]:
        """Return a name of the run's folder that is a file, or all files below it, relative to that folder."""
        if (self._folder / name).is_file():
            yield name
        for parent, _, files in os.walk(self._folder / name):
            yield from (self._name(Path(parent) / file) for file in files)

    def _append(self, line: dict) -> None:
        self._apply(line)
        if self._write:
            path = self._folder / MANIFEST
            if self._lines.damaged or self._lines.is_cut:
                rewrite_lines(path, self._lines.intact, self._lines.damaged)
                self._lines = JsonLines([], [], False)
            with named_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _apply(self, line: dict) -> None:
        self._trees.discard(line["path"])
        if "files" in line:
            self._files.update(line["files"])
            (self.unlisted.discard if line["files"] else self.unlisted.add)(line["path"])
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


def set_aside(folder: Path) -> None:
    """Move the files of the folder's run, if there is one, into a folder of their own inside it."""
    if not (folder / MANIFEST).exists():
        return
    names = RunFiles(folder).present()
    moving = Path(tempfile.mkdtemp(prefix=ASIDE, suffix=_MOVING, dir=folder))
    _move(folder, moving, [*names, MANIFEST])
    moving.rename(moving.with_name(moving.name.removesuffix(_MOVING)))


def discard_previous(folder: Path) -> None:
    """Delete the files of the run before."""
    for aside in _asides(folder):
        shutil.rmtree(aside)


def restore_previous(folder: Path) -> None:
    """Delete the files of the folder's run, and move those of the run before back in their place."""
    for aside in _asides(folder):
        if not aside.name.endswith(_MOVING):
            _delete(folder, [*RunFiles(folder).present(), MANIFEST])
            aside = aside.rename(aside.with_name(aside.name + _MOVING))
        names = [path.relative_to(aside).as_posix() for path in aside.rglob("*") if not path.is_dir()]
        _move(aside, folder, sorted(names, key=lambda name: name == MANIFEST))
        shutil.rmtree(aside)


def recover(folder: Path) -> None:
    """Finish the replacement that a killed process began: keep the run that has a checkpoint."""
    for aside in _asides(folder):
        if not aside.name.endswith(_MOVING) and has_checkpoint(folder):
            shutil.rmtree(aside)
        else:
            restore_previous(folder)
            _log.warning("%s: restored its run, which another was to replace and ended before a checkpoint", folder)


def is_replaced(folder: Path) -> bool:
    """Tell whether a killed process has left files of the folder's run aside, for `recover`."""
    return bool(_asides(folder))


def has_checkpoint(folder: Path) -> bool:
    """Tell whether the folder's run has saved a checkpoint."""
    checkpoints = (path for path in folder.glob("checkpoints/*/") if path.name.isdigit())
    return any(any(path.iterdir()) for path in checkpoints)


def _asides(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{ASIDE}*"))


def _move(source: Path, target: Path, names: list[str]) -> None:
    for name in names:
        if (source / name).exists() or (source / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(source / name, target / name)
    _remove_empty(source, names)


def _delete(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    _remove_empty(folder, names)


def _remove_empty(folder: Path, names: list[str]) -> None:
    """Remove the folders of these files, where nothing is left in them."""
    parents = {parent for name in names for parent in Path(name).parents} - {Path(".")}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):
            (folder / parent).rmdir()
