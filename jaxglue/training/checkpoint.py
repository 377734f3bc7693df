"""Checkpoints of a run: written in the background, the latest and the best kept, damaged ones skipped on resume."""

import contextlib
import gc
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.engine.array_checks import check_arrays
from jaxglue.files.atomic import sync
from jaxglue.files.json_file import read_json
from jaxglue.training.fingerprint import check_fingerprint

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


_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A checkpoint read back."""

    state: PyTree
    """Device arrays with the requested shardings and dtypes."""
    host: dict[str, Any]
    """The JSON values given to `save`."""
    step: int
    """Optimizer steps done."""
    fingerprint: dict[str, Any]
    """Fingerprint of the run that saved it."""


def _eval_loss(metrics: Mapping[str, float]) -> float:
    return metrics["eval_loss"]


class Checkpoints:
    """The checkpoints of one run, in a folder of their own; leaving the context finishes the save under way."""

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: Mapping[str, Any],
        keep: int = 2,
        processes: Processes = SINGLE_PROCESS,
        before_write: Callable[[Path], None] = lambda folder: None,
        saved: Callable[[Path], None] = lambda folder: None,
    ):
        """Open the folder and remove remains of interrupted saves.

        Args:
            folder: created if missing.
            fingerprint: JSON values that a resumed run must share: model, data, seed, ….
            keep: number of latest checkpoints to keep, besides the one with the lowest eval loss; at least 2, as the
                latest may turn out to precede a divergence.
            processes: all call every method alike; each writes its own shards.
            before_write, saved: called with the folder of each checkpoint, before it is written and once it is on disk.
        """
        self._folder = folder.absolute()
        self._fingerprint = dict(fingerprint)
        self._processes = processes
        self._before_write, self._saved = before_write, saved
        self._saving: int | None = None
        self._failed = self._abandoned = False
        best = policies.BestN(get_metric_fn=_eval_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            best_fn=_eval_loss,
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(max(keep, 2)), best]),
            cleanup_tmp_directories=True,
            temporary_path_class=DurablePath,
        )
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_orbax())
        self._manager = Manager(self._folder, options=options)

    def save(self, step: int, state: PyTree, host: Mapping[str, Any], *, eval_loss: float | None = None) -> None:
        """Copy `state` off the device, then write it in the background; wait first for the previous save.

        Args:
            step: optimizer steps done.
            state: arrays, which may be donated after this returns.
            host: JSON values: epoch, the data iterator's state, ….
            eval_loss: measured at this step, if any; the checkpoint with the lowest is kept.

        Raises:
            NonFinite: an array of the state has infinite or NaN elements; nothing is written.
            OSError: this save or the previous one failed, as on a full disk; earlier checkpoints are intact.
        """
        self.wait()
        checks = check_arrays(state)
        if bad := [name for name, check in checks.items() if not check.is_finite]:
            raise NonFinite(bad)
        measured = eval_loss is not None and math.isfinite(eval_loss)
        digests = {name: check.digest for name, check in checks.items()}
        meta = _signed({"host": dict(host), "fingerprint": self._fingerprint, "arrays": digests})
        self._before_write(self._folder / str(step))
        self._saving = step
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with self._explained():
            is_saved = self._manager.save(step, args=items, metrics={"eval_loss": eval_loss} if measured else None)
            if not is_saved and not (self._folder / str(step)).is_dir():
                raise ValueError("this step or a later one had been saved there, and is gone")

    def wait(self) -> None:
        """Wait until the last save is on disk; `OSError` if it failed."""
        with self._explained():
            self._manager.wait_until_finished()
        if self._saving is not None:
            self._saved(self._folder / str(self._saving))
            self._saving = None

    def restore_latest(self, abstract_state: PyTree) -> Restored | None:
        """Read the newest intact checkpoint; None without checkpoints.

        Damaged checkpoints are reported and, after an earlier one was read, renamed to `<step>.damaged`, so that the
        resumed run can write these steps again.

        Args:
            abstract_state: `jax.ShapeDtypeStruct` with a sharding for each array of the state.

        Raises:
            ValueError: the checkpoint belongs to another run (see `check_fingerprint`), or none could be read.
            OSError: the save under way failed.
        """
        self.wait()
        damaged: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            if restored := self._restore(step, abstract_state):
                self._rename(damaged, "damaged")
                return restored
            damaged.append(step)
        if damaged:
            raise ValueError(f"none of the checkpoints {damaged} in {self._folder} can be read: start a new run")
        return None

    def restore_best(self, abstract_state: PyTree) -> Restored:
        """Read the checkpoint with the lowest eval loss.

        Args:
            abstract_state: as for `restore_latest`.

        Raises:
            ValueError: no checkpoint has an eval loss, or the best one is damaged.
        """
        self.wait()
        losses = {step: found for step in self._manager.all_steps() if (found := self._manager.metrics(step))}
        if not losses:
            raise ValueError(f"no checkpoint in {self._folder} has an eval loss: use --keep last")
        best = min(losses, key=lambda step: (_eval_loss(losses[step]), step))
        if restored := self._restore(best, abstract_state):
            return restored
        raise ValueError(f"the best checkpoint, of step {best}, is damaged: use --keep last")

    def _restore(self, step: int, abstract_state: PyTree) -> Restored | None:
        """Read one checkpoint; None if it is damaged."""
        signed = self._read(step, "meta", ocp.args.JsonRestore(), check_meta)
        if signed is None:
            return None
        meta = signed["content"]
        check_fingerprint(meta["fingerprint"], self._fingerprint)
        args = ocp.args.StandardRestore(abstract_state)
        state = self._read(step, "state", args, partial(check_digests, meta["arrays"]))
        return None if state is None else Restored(state, meta["host"], step, meta["fingerprint"])

    @property
    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in order, waiting for one under way."""
        self.wait()
        return sorted(self._manager.all_steps())

    @property
    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, waiting for one under way; None without checkpoints."""
        return max(self.steps, default=None)

    def reject(self, first: int) -> list[int]:
        """Rename the checkpoints from step `first` on to `<step>.diverged`, so that a resumed run begins before them.

        Returns:
            their steps.
        """
        steps = [step for step in self.steps if step >= first]
        self._rename(steps, "diverged")
        return steps

    def close(self) -> None:
        """Finish the last save; `OSError` if it failed."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError) if self._failed else self._explained():  # the manager raises it again
                self._manager.close()
            self._quiet.close()
            if self._failed or self._abandoned:
                silence_abandoned()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs, check: Callable[[Any], None]) -> Any:
        """Read one part of a checkpoint; None on every process, with a warning, if any process cannot.

        Orbax raises a plain `Exception` for truncated array data. Running out of memory is not damage.
        """
        found, reason = None, None
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except MemoryError:
            raise
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            reason, self._abandoned = reason_of(error), True
        reasons = list(filter(None, self._processes.all_gather_object(reason)))
        if not reasons:
            try:
                check(found)
                return found
            except ValueError as error:
                reasons = [str(error)]
        _log.warning("checkpoint %s is damaged, trying the one before: %s", self._folder / str(step), reasons[0])
        gc.collect()  # abandoned reads of Orbax log their errors on collection: now, while its loggers are silent
        return None

    def _rename(self, steps: list[int], suffix: str) -> None:
        with self._processes.main_process_first():
            for step in steps if self._processes.is_main else ():
                target = self._folder / f"{step}.{suffix}"
                self._before_write(target)
                shutil.rmtree(target, ignore_errors=True)
                (self._folder / str(step)).rename(target)
        if steps:
            self._manager.reload()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the save under way into one `OSError` for the user."""
        try:
            yield
        except (OSError, ValueError) as error:
            step, self._saving, self._failed = self._saving, None, True
            for leftover in self._folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            free, intact = shutil.disk_usage(self._folder).free / 1e9, sorted(self._manager.all_steps())
            remedy = f"Earlier checkpoints are intact: {intact}. Make room, then continue with --resume."
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {reason_of(error)} "
                f"({free:.2f} GB free). {remedy if intact else _NONE_INTACT}"
            ) from error


_NONE_INTACT = "This run has no earlier one. Make room, then start it again."


class NonFinite(ValueError):  # noqa: N818
    """Arrays of a state, `names`, have infinite or NaN elements."""

    def __init__(self, names: list[str]):
        super().__init__(f"{len(names)} arrays are not finite, the first of them {names[0]}")
        self.names = names


def _signed(content: dict[str, Any]) -> dict[str, Any]:
    copied = json.loads(json.dumps(content))  # written in the background, while the run changes its state
    return {"content": copied, "digest": _digest(copied)}


def newest_fingerprint(checkpoints: Path) -> tuple[int, dict[str, Any]] | None:
    """Return step and fingerprint of the newest checkpoint of a folder whose settings are intact; None without one."""
    for step in sorted((int(path.name) for path in checkpoints.glob("*/") if path.name.isdecimal()), reverse=True):
        try:
            meta = read_json(checkpoints / str(step) / "meta" / "metadata")
            check_meta(meta)
        except (OSError, ValueError):
            continue
        return step, meta["content"]["fingerprint"]
    return None


def check_meta(meta: Any) -> None:
    """Raise `ValueError` if a checkpoint's settings and position differ from their digest."""
    if not isinstance(meta, dict) or meta.keys() != {"content", "digest"} or _digest(meta["content"]) != meta["digest"]:
        raise ValueError("its settings and position differ from their digest")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def check_digests(saved: Mapping[str, str], state: PyTree) -> None:
    """Raise `ValueError` naming the first array that differs from its digest."""
    found = {name: check.digest for name, check in check_arrays(state).items()}
    if wrong := [name for name in {**saved, **found} if saved.get(name) != found.get(name)]:
        raise ValueError(f"{len(wrong)} of {len(found)} arrays differ from their digests, the first of them {wrong[0]}")
