"""Orbax as checkpoints need it: folders on disk before they have their name, short reasons, no noise of its threads."""

import contextlib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

from jaxglue.files.atomic import sync

_SHORTEST = 8
"""Characters of a cause that says something by itself."""


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which cannot open a folder with a damaged metric."""

    def metrics(self, step: int) -> PyTree | None:
        """Read a checkpoint's eval loss; None without a finite one, or where it cannot be read."""
        try:
            found = super().metrics(step)
        except (ValueError, OSError, RecursionError):
            return None
        loss = found.get("eval_loss") if isinstance(found, dict) else None
        return {"eval_loss": loss} if isinstance(loss, float) and math.isfinite(loss) else None


class DurablePath(AtomicRenameTemporaryPath):
    """Orbax's temporary folder, synced to disk file by file before the rename that publishes it."""

    async def finalize(self) -> None:
        """Complete the folder under a temporary name, sync it, and rename it."""
        final = self.get_final()
        self._final_path: Any = final.parent / f"{final.name}.synced{self._tmp_path.suffix}"
        try:
            await super().finalize()
            sync_tree(Path(self._final_path))
            os.rename(self._final_path, final)
        finally:
            self._final_path = final
        sync(Path(final.parent))


def sync_tree(folder: Path) -> None:
    """Sync all files and folders below a folder, and the folder itself."""
    for parent, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync(Path(parent, file))
        sync(Path(parent))


def reason_of(error: Exception) -> str:
    """Shorten an error to its cause, without the paths that the storage library adds."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = re.split(r"\n| \[(?:os_error_code|tensorstore_spec)|\. See full", str(error), maxsplit=1)[0]
    cause = message.rpartition(": ")[2]
    return (cause if len(cause) >= _SHORTEST and cause[0] != "(" else message)[:200] or type(error).__name__


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silence Orbax's background threads, which log and print tracebacks of errors that it raises anyway."""
    hook = sys.unraisablehook
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = partial(_print_unless_abandoned, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def silence_abandoned() -> None:
    """Silence reports of abandoned writes and reads, which are collected as late as the process's exit."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = partial(_print_unless_abandoned, sys.unraisablehook)


def _print_unless_abandoned(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Drop the errors of Orbax's writes and reads that end after their caller, and pass on all others."""
    code = getattr(unraisable.object, "cr_code", None)
    if str(unraisable.exc_value) != "Event loop is closed" and "orbax" not in getattr(code, "co_filename", ""):
        hook(unraisable)
