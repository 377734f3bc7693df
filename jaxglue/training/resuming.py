"""Continuation of a run: what has changed since, and runs that have reached their end."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxglue.distributed import Processes
from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.json_file import read_json
from jaxglue.training.checkpoint import Restored
from jaxglue.training.fingerprint import changed_settings, fingerprint, fingerprint_differences
from jaxglue.training.optimizer import learning_rate_schedule
from jaxglue.training.report import PATHS, RunSummary, read_summary, summary_rows
from jaxglue.training.run_folder import is_replaced
from jaxglue.training.setup import Setup

_log = logging.getLogger(__name__)


def resume_notes(setup: Setup, restored: Restored) -> Iterator[str]:
    """Yield lines about a resumed run: its step, changed settings, and a changed length.

    Raises:
        ValueError: the checkpoint lies beyond the run's last step.
    """
    step, total, before = restored.step, setup.total_steps, restored.fingerprint["steps"]
    if step > total:
        raise ValueError(
            f"--resume: the run has done {step:,} steps, more than the {total:,} asked for: raise --steps or --epochs"
        )
    yield f"resumed from step {step}"
    for key, text in changed_settings(setup.config.run.output / "config.toml", setup.config).items():
        yield f"changed setting {key}: {text}"
    if before != total:
        old, new = (learning_rate_schedule(setup.config.optimizer, steps) for steps in (before, total))
        yield (
            f"the run ends at step {total:,} in place of {before:,}, by the {setup.config.optimizer.schedule} schedule "
            f"of {total:,} steps from here on: learning rate {float(old(max(step - 1, 0))):.3g} at step {step:,}, "
            f"{float(new(step)):.3g} at step {step + 1:,}"
        )


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
