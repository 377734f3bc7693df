"""Runs that have reached their end, which --resume leaves as they are."""

import logging
from pathlib import Path
from typing import Any

from jaxglue.distributed import Processes
from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.json_file import read_json
from jaxglue.training.differences import fingerprint_differences
from jaxglue.training.fingerprint import fingerprint
from jaxglue.training.previous_run import is_replaced
from jaxglue.training.setup import Setup
from jaxglue.training.summary import PATHS, RunSummary, read_summary, summary_rows

_log = logging.getLogger(__name__)


def finished_run(setup: Setup, processes: Processes) -> RunSummary | None:
    """Return, on every process, the results of the run in the output folder if it is this one and has no steps left."""
    values = processes.all_gather_object(_finished_summary(setup) if processes.is_main else None)[0]
    return read_summary(values) if values else None


def _finished_summary(setup: Setup) -> dict[str, Any] | None:
    path = setup.config.run.output / "summary.json"
    if not path.is_file() or is_replaced(path.parent):
        return None
    try:
        values = read_json(path)
        saved, run = values.pop("fingerprint", None), setup.config.run
        if (values.pop("keep", "last"), values.pop("early_stopping", None)) != (run.keep, run.early_stopping):
            return None
        if not isinstance(saved, dict) or fingerprint_differences(saved, fingerprint(setup)):
            return None
        values |= {name: str(run.output / Path(values[name]).name) for name in PATHS if values.get(name)}
        summary = read_summary(values)
        summary_rows(summary)
        at_end = summary.steps >= setup.total_steps or summary.stopped_early
        base = run.output / "base"
        folders = [folder for folder in (summary.adapter, summary.last_adapter, base.is_dir() and base) if folder]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: delete it, and --resume writes it again") from None
    return values if at_end and folders and _are_whole(folders) else None


def _are_whole(folders: list[Path]) -> bool:
    """Tell whether exported adapters or models can be read; say which cannot."""
    for folder in folders:
        if not folder.is_dir():
            return False
        try:
            load_adapter(folder) if folder.name.startswith("adapter") else open_checkpoint(folder)
        except (OSError, ValueError) as error:
            _log.warning("the results of the run are written again: %s", error)
            return False
    return True
