"""Checkpoints of a run: written in the background, last N and best kept, a damaged one passed over on resume."""

import contextlib
import gc
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import orbax.checkpoint as ocp
from jaxtyping import PyTree

from jaxglue.distributed import SINGLE_PROCESS, Processes

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A checkpoint that was read back."""

    state: PyTree
    """The device arrays, with the shardings and dtypes that were asked for."""
    host: dict[str, Any]
    """What `save` got as `host`."""
    step: int
    """The number of optimizer steps done."""


class _LastAndBest:
    """Orbax's preservation policy: the last `keep` checkpoints and the one with the lowest eval loss."""

    def __init__(self, keep: int):
        self._keep = keep
        self.eval_losses: dict[int, float] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each checkpoint, in order of steps, whether it stays."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        self.eval_losses = {step: loss for step, loss in self.eval_losses.items() if step in steps}
        best = min(self.eval_losses, key=self.eval_losses.__getitem__, default=None)
        return [step == best or step in steps[-self._keep :] for step in steps]


class Checkpoints:
    """The checkpoints of one run, in a folder of their own; closing it, or leaving its context, finishes the last."""

    def __init__(
        self, folder: Path, *, fingerprint: Mapping[str, Any], keep: int = 2, processes: Processes = SINGLE_PROCESS
    ):
        """Opens the folder and removes what an interrupted save left there.

        Args:
            folder: made if missing.
            fingerprint: JSON values that a resumed run must share: model, data, seed, ….
            keep: how many of the latest checkpoints to keep, beside the one with the lowest eval loss.
            processes: those of the run; each writes its own part of the arrays, and all call every method alike.
        """
        self._folder = folder.absolute()
        self._fingerprint = dict(fingerprint)
        self._processes = processes
        self._saving: int | None = None
        self._preserved = _LastAndBest(keep)
        options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, preservation_policy=self._preserved)
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_quiet_orbax())
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def save(self, step: int, state: PyTree, host: Mapping[str, Any], *, eval_loss: float | None = None) -> None:
        """Copies `state` off the device, then writes it in the background; waits first for the save before.

        Args:
            step: optimizer steps done.
            state: arrays; they may be donated as soon as this returns.
            host: JSON values: epoch, the data iterator's state, ….
            eval_loss: the latest one, if it was measured at this step; the checkpoint with the lowest is kept.

        Raises:
            OSError: this save or the one before could not be written, as on a full disk; earlier ones are intact.
        """
        self.wait()
        self._saving = step
        if eval_loss is not None and math.isfinite(eval_loss):
            self._preserved.eval_losses[step] = eval_loss
        meta = {
            "host": dict(host),
            "fingerprint": self._fingerprint,
            "eval_losses": list(self._preserved.eval_losses.items()),
        }
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with self._explained():
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Returns when the last save is on disk; `OSError` if it could not be written."""
        with self._explained():
            self._manager.wait_until_finished()

    def restore_latest(self, abstract_state: PyTree) -> Restored | None:
        """The newest checkpoint that can be read, or None if there is none at all.

        A damaged one is reported and, once an earlier one was read, renamed to `<step>.damaged`, so that the resumed
        run can write its own.

        Args:
            abstract_state: a `jax.ShapeDtypeStruct` with a sharding for each array of the state.

        Raises:
            ValueError: the checkpoint belongs to another run (see `check_fingerprint`), or none could be read.
        """
        damaged: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            meta = self._read(step, "meta", ocp.args.JsonRestore())
            if meta is not None:
                check_fingerprint(meta["fingerprint"], self._fingerprint)
                state = self._read(step, "state", ocp.args.StandardRestore(abstract_state))
                if state is not None:
                    self._set_aside(damaged)
                    self._preserved.eval_losses = dict(meta["eval_losses"])
                    return Restored(state, meta["host"], step)
            damaged.append(step)
        if damaged:
            raise ValueError(f"none of the checkpoints {damaged} in {self._folder} can be read: start a new run")
        return None

    def close(self) -> None:
        """Finishes the last save; `OSError` if it could not be written."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._quiet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        """One part of a checkpoint, or None, on every process, with a warning.

        Orbax raises a plain `Exception` for array data that is cut short. Running out of memory is no damage.
        """
        found, reason = None, None
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except (RuntimeError, MemoryError):
            raise
        except Exception as error:
            reason = _reason(error)
        reasons = list(filter(None, self._processes.all_gather_object(reason)))
        if not reasons:
            return found
        _log.warning("checkpoint %s is damaged, trying the one before: %s", self._folder / str(step), reasons[0])
        gc.collect()  # the reads that Orbax abandoned log their own errors when they are collected
        return None

    def _set_aside(self, steps: list[int]) -> None:
        with self._processes.main_process_first():
            for step in steps if self._processes.is_main else ():
                (self._folder / str(step)).rename(self._folder / f"{step}.damaged")
        if steps:
            self._manager.reload()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Tells the user, rather than Orbax's threads, what became of the save under way."""
        try:
            yield
        except (OSError, ValueError) as error:
            for leftover in self._folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            free = shutil.disk_usage(self._folder).free / 1e9
            raise OSError(
                f"the checkpoint of step {self._saving} could not be written to {self._folder}: {_reason(error)} "
                f"({free:.2f} GB free). Earlier checkpoints are intact: {sorted(self._manager.all_steps())}. "
                "Make room, then continue with --resume."
            ) from error


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names each entry in which a run to resume differs from the one that was started."""
    current = json.loads(json.dumps(current))
    differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    if differing:
        lines = (f"  {key}: saved {saved.get(key)!r}, now {current.get(key)!r}" for key in differing)
        raise ValueError(
            "cannot resume, this run differs from the one that wrote the checkpoint:\n"
            + "\n".join(lines)
            + "\nUse the saved values, or start a new run in another output folder."
        )


def _reason(error: Exception) -> str:
    """What went wrong, without the layers of paths that the storage library wraps around it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = re.split(r"\n| \[(?:os_error_code|tensorstore_spec)", str(error), maxsplit=1)[0]
    return message.rpartition(": ")[2][:200] or type(error).__name__


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keeps Orbax's background threads and tasks from logging tracebacks of errors that it raises anyway."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
