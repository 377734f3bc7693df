"""Replacement of a run: its files are moved aside, and deleted only once the new run has a checkpoint."""

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from jaxglue.training.run_files import MANIFEST, RunFiles

ASIDE = ".jaxglue-old-"
"""Begins the name of the folder with the files of the run before."""
_MOVING = ".moving"
"""Ends it until all are in it."""
_log = logging.getLogger(__name__)


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
