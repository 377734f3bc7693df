"""The folder of the run under way: its files are listed there, and the previous run is kept until it is replaced."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.hf.files import atomic_file
from jaxglue.training.own_lines import DAMAGED
from jaxglue.training.previous_run import discard_previous, restore_previous, set_aside
from jaxglue.training.run_files import MANIFEST, RunFiles

_FILES = ("config.toml", "metrics.jsonl", "samples.jsonl", "summary.json", "trackers.json", "loss.png")
_LINES = ("metrics.jsonl", "samples.jsonl", MANIFEST)


class RunFolder:
    """Folder of a run, which nothing is written to before `begin`.

    Args:
        path: locked by `output_folder`.
        overwrite: replace its run.
        processes: of the run; process 0 writes.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, processes: Processes = SINGLE_PROCESS):
        self.path, self._overwrite, self._processes = path, overwrite, processes
        self._files = RunFiles(path, write=processes.is_main)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Move the run before aside; it comes back if an error ends the context before the first checkpoint."""
        if not self._overwrite:
            yield
            return
        with self._processes.main_process_first():
            if self._processes.is_main:
                set_aside(self.path)
        self._files = RunFiles(self.path, write=self._processes.is_main)
        try:
            yield
        except BaseException:
            if self._overwrite and self._processes.is_main:
                restore_previous(self.path)
            raise

    def begin(self, recipe: str) -> None:
        """List the files of a run that trains, and write its recipe to `config.toml`."""
        if not self._processes.is_main:
            return
        for name in (*_FILES, *(f".{name}.tmp" for name in _FILES), *(name + DAMAGED for name in _LINES)):
            self._files.claim(self.path / name)
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
