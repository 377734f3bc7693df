"""Continuation of a run: changes since its checkpoint, and runs that have reached their end."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxglue.distributed import Processes
from jaxglue.files.json_file import read_json
from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.training.checkpoint import Restored, newest_fingerprint
from jaxglue.training.fingerprint import (
    HELD_OUT,
    changed_settings,
    check_fingerprint,
    fingerprint,
    fingerprint_differences,
)
from jaxglue.training.partwise import learning_rate_schedule
from jaxglue.training.report import PATHS, RunSummary, read_summary, summary_rows
from jaxglue.training.run import Run
from jaxglue.training.run_folder import is_replaced

_log = logging.getLogger(__name__)


def resume_notes(run: Run, restored: Restored) -> Iterator[str]:
    """Yield lines about a resumed run: its step, changed settings, and a changed length.

    Raises:
        ValueError: the checkpoint lies beyond the run's last step.
    """
    step, total, before = restored.step, run.schedule.total_steps, restored.fingerprint["steps"]
    _require_within(step, total)
    yield f"resumed from step {step}"
    for key, text in changed_settings(run.output.folder / "config.toml", run).items():
        yield f"changed setting {key}: {text}"
    before_rows = restored.fingerprint.get("inputs", {}).get(HELD_OUT)
    if before_rows and run.data.eval is not None and run.data.eval.fingerprint != before_rows:
        yield "held-out rows have changed: eval losses before this step are of others"
    if before != total:
        old, new = (learning_rate_schedule(run.schedule.optimizer, steps) for steps in (before, total))
        yield (
            f"the run ends at step {total:,} in place of {before:,}, by the {run.schedule.optimizer.schedule} schedule "
            f"of {total:,} steps from here on: learning rate {float(old(max(step - 1, 0))):.3g} at step {step:,}, "
            f"{float(new(step)):.3g} at step {step + 1:,}"
        )


def check_resumable(run: Run) -> None:
    """Raise ValueError where the newest checkpoint in the run's folder is of another run, or beyond its last step."""
    if newest := newest_fingerprint(run.output.folder / "checkpoints"):
        step, saved = newest
        check_fingerprint(saved, fingerprint(run))
        _require_within(step, run.schedule.total_steps)


def _require_within(step: int, total: int) -> None:
    if step > total:
        raise ValueError(
            f"--resume: the run has done {step:,} steps, more than the {total:,} asked for: raise --steps or --epochs"
        )


def finished_run(run: Run, processes: Processes) -> RunSummary | None:
    """Return, on every process, the results of the run in the output folder if it is this one and has no steps left."""
    values = processes.all_gather_object(_finished_summary(run) if processes.is_main else None)[0]
    return read_summary(values) if values else None


def _finished_summary(run: Run) -> dict[str, Any] | None:
    output, path = run.output, run.output.folder / "summary.json"
    if not path.is_file() or is_replaced(path.parent):
        return None
    try:
        values = read_json(path)
        saved = values.pop("fingerprint", None)
        if (values.pop("keep", "last"), values.pop("early_stopping", None)) != (output.keep, output.early_stopping):
            return None
        if not isinstance(saved, dict) or fingerprint_differences(saved, fingerprint(run)):
            return None
        values |= {name: str(output.folder / Path(values[name]).name) for name in PATHS if values.get(name)}
        summary = read_summary(values)
        summary_rows(summary)
        at_end = summary.steps >= run.schedule.total_steps or summary.stopped_early
        base = output.folder / "base"
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
