"""Processes forked from a server that has imported what training needs: each start saves seconds of imports."""

import gc
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from jaxglue.commands import main
from jaxglue.training import loop

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["jaxglue.commands.train"])


class Forked:
    """A process that calls a function, its output in files of a folder."""

    def __init__(self, folder: Path, function: Callable[..., object], *arguments: Any):
        folder.mkdir(parents=True)
        self._outputs = [folder / name for name in ("stdout", "stderr")]
        self.process: BaseProcess = _SERVER.Process(target=_call, args=(self._outputs, function, arguments))
        self.process.start()

    def wait(self, seconds: float) -> tuple[int | None, str, str]:
        """Return exit status, negative for a signal and None where it still runs, standard output and error."""
        self.process.join(seconds)
        stdout, stderr = (path.read_text() for path in self._outputs)
        return self.process.exitcode, stdout, stderr


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a script as Python's command line does."""
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def run_command(home: str, arguments: list[str]) -> None:
    """Run `jaxglue` as a user with this home."""
    os.environ["HOME"] = home
    main(arguments)


def _call(outputs: list[Path], function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    gc.freeze()
    loop.save_loss_curve = lambda *_: None  # type: ignore[assignment]
    function(*arguments)
