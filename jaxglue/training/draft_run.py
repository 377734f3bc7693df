"""Keep the settings, answers and checkpoints of a run of `jaxglue draft` on disk until its head is written."""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from jaxglue.files.atomic import require_empty
from jaxglue.files.journal import Journal
from jaxglue.files.json_file import read_json, write_json
from jaxglue.hf.folder_digest import adapter_digest
from jaxglue.hf.identity import weights_digest
from jaxglue.settings.recipe import as_dict, defaults_of
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.draft_config import DraftConfig
from jaxglue.training.draft_texts import DraftText
from jaxglue.training.fingerprint import check_fingerprint

_SETTINGS = "settings.json"
_NAMED_OTHERWISE = (
    *("model", "revision", "adapter", "data", "columns", "system"),
    *("output", "resume", "save_every", "memory_limit", "compilation_cache"),
)
"""Settings that tell in digests, and those in which a run that goes on may differ."""


def run_folder(output: Path) -> Path:
    """Return the folder beside a head's in which its run is."""
    return output.with_name(f"{output.name}.training")


def is_written(config: DraftConfig) -> bool:
    """Return whether the head of a run that goes on is written.

    Raises:
        ValueError: the folders of another run or head.
    """
    folder = run_folder(config.output)
    if folder.exists() and not config.resume:
        raise ValueError(f"{folder} holds a run that was interrupted: continue it with --resume, or delete the folder")
    if folder.exists() and config.output.is_dir() and any(config.output.iterdir()):
        return True
    require_empty(config.output)
    return False


class DraftRun:
    """Answers and checkpoints of a run; a context that closes them.

    Args:
        config: of the command.
        rows: of its data.

    Raises:
        ValueError: settings, model or data differ from those with which the run began.
    """

    def __init__(self, config: DraftConfig, rows: Sequence[DraftText]):
        folder, shared = run_folder(config.output), fingerprint(config, rows)
        self._open, settings = ExitStack(), folder / _SETTINGS
        if settings.is_file():
            check_fingerprint(read_json(settings), shared)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(settings, shared)
        self.answers = self._open.enter_context(Journal(folder / "answers.jsonl", {}))
        self.checkpoints = self._open.enter_context(Checkpoints(folder / "checkpoints", fingerprint=shared))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()


def remove_run(output: Path) -> None:
    """Delete what a run needed until its head was written."""
    shutil.rmtree(run_folder(output))


def fingerprint(config: DraftConfig, rows: Sequence[DraftText]) -> dict[str, Any]:
    """Return what a run that goes on must share with the one that began, JSON-able."""
    data = hashlib.sha256()
    for row in rows:
        data.update(row.tokens.tobytes() + row.counted.tobytes())
    settings = {name: value for name, value in as_dict(config).items() if name not in _NAMED_OTHERWISE}
    return {
        "weights": "random" if config.seed is not None else weights_digest(config.folder),
        "adapter": None if config.adapter is None else adapter_digest(config.adapter),
        "data": data.hexdigest()[:16],
        **settings,
        "defaults": defaults_of(config),
    }
