"""Destinations of a run's metrics: `metrics.jsonl`, TensorBoard and experiment trackers."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from jaxglue.hf.files import named_errors
from jaxglue.training.metrics import read_steps
from jaxglue.training.own_lines import rewrite_lines
from jaxglue.training.trackers import Tracker

_FLUSH_SECONDS = 10
"""Between flushes of TensorBoard's events, each of which waits for the disk."""


class Logger(Protocol):
    """Receives a run's metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one optimizer step; they may be infinite or NaN."""

    def close(self, *, failed: bool = False) -> None:
        """Flush and close; `failed` after an error."""


class JsonLinesLogger:
    """Appends one line of JSON a step; values that are not finite become `null`.

    Args:
        path: the file; lines of steps after `resume_step` are dropped, because these steps run again; damaged ones are
            moved aside.
        resume_step: last step of the resumed run; 0 for a new run.
    """

    def __init__(self, path: Path, *, resume_step: int = 0):
        _truncate(path, resume_step)
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line, on disk at once."""
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with named_errors(self._path):
            self._file.write(json.dumps({"step": step} | line) + "\n")
            self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        with named_errors(self._path):
            self._file.close()


class TensorBoardLogger:
    """Writes TensorBoard events; steps after `resume_step` of an earlier run are hidden.

    Args:
        folder: TensorBoard's log folder.
        resume_step: last step of the resumed run; 0 for a new run.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0):
        # Written here, as tensorboardX's thread would die of a full disk, and its queue never empty.
        self._folder, self._flushed = folder, time.monotonic()
        with named_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # The suffix keeps apart the files of two starts in one second.
            self._events = EventsWriter(str(folder / "events"), filename_suffix=f".{resume_step}")
            begin = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=begin))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event a value, but none for values that are not finite."""
        finite = ((name, value) for name, value in values.items() if math.isfinite(value))
        with named_errors(self._folder):
            for name, value in finite:
                self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._events.flush()
                self._flushed = time.monotonic()

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the event file."""
        with named_errors(self._folder):
            self._events.close()


class Loggers:
    """Passes metrics on to several loggers; none of them on processes other than the main one."""

    def __init__(self, loggers: Sequence[Logger] = ()):
        self._loggers = loggers

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the values of one step; None is left out."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        for logger in self._loggers:
            logger.log(step, known)

    def close(self, *, failed: bool = False) -> None:
        """Close all loggers."""
        for logger in self._loggers:
            logger.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(failed=kind is not None)


def open_loggers(
    folder: Path,
    *,
    resume_step: int = 0,
    trackers: Sequence[str] = ("tensorboard",),
    settings: Mapping[str, Any] | None = None,
) -> Loggers:
    """Open `metrics.jsonl` in a run's folder, and the trackers.

    Args:
        folder: of the run.
        resume_step: last step of a resumed run; 0 for a new one.
        trackers: names of `jaxglue.training.trackers`.
        settings: of the run, for the trackers, without secrets.

    Raises:
        ValueError: a tracker cannot start a run.
    """
    loggers: list[Logger] = [JsonLinesLogger(folder / "metrics.jsonl", resume_step=resume_step)]
    for name in trackers:
        if name == "tensorboard":
            loggers.append(TensorBoardLogger(folder / "tensorboard", resume_step=resume_step))
        else:
            loggers.append(Tracker(name, folder, settings or {}, resumed=resume_step > 0))
    return Loggers(loggers)


def _truncate(path: Path, last_step: int) -> None:
    lines = read_steps(path)
    rewrite_lines(path, (line for line in lines.intact if line["step"] <= last_step), lines.damaged)
