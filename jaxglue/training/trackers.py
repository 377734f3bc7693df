"""Destinations of a run's metrics: `metrics.jsonl`, TensorBoard, Weights & Biases, Trackio and MLflow."""

import importlib.util
import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from jaxglue.files.atomic import named_errors
from jaxglue.files.json_file import read_json, write_json
from jaxglue.files.json_lines import read_steps, rewrite_lines
from jaxglue.settings.config import NONE
from jaxglue.settings.spelling import nearest

_FLUSH_SECONDS = 10
"""Between flushes of TensorBoard's events, each of which waits for the disk."""
PACKAGES = {"tensorboard": None, "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Package by tracker; None for one that comes with the library."""
IDS = "trackers.json"
"""File in a run's folder with its identity at each tracker, by which a resumed run goes on there."""
_PROJECT = "jaxglue"
_MOST_BUFFERED = 100
"""Metrics that MLflow receives in one request."""
_LONGEST = 500
"""Characters of a setting that MLflow stores."""
_log = logging.getLogger(__name__)


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


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise ValueError for an unknown tracker, or one whose package is not installed."""
    for name in names:
        if name not in PACKAGES:
            raise ValueError(f"--log-to {name}: expected {', '.join(PACKAGES)} or none{nearest(name, PACKAGES)}")
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--log-to {name} needs the package {package}: pip install '.[{name}]' in the clone of jaxglue"
            )


class Tracker:
    """Passes a run's metrics on to a tracker, whose failure ends the tracking and not the run.

    Args:
        name: of `PACKAGES`.
        folder: of the run.
        settings: of the run, nested, without secrets.
        resumed: go on with the run that `trackers.json` names.

    Raises:
        ValueError: the tracker cannot start a run.
    """

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any], *, resumed: bool):
        self._name = name
        ids = read_json(folder / IDS) if resumed and (folder / IDS).is_file() else {}
        identity = ids.get(name) or uuid.uuid4().hex[:8]
        try:
            self._service = _SERVICES[name](folder, identity, settings)
        except Exception as error:
            offline = {"wandb": ", or set WANDB_MODE=offline"}.get(name, "")
            raise ValueError(f"--log-to {name}: {_first_line(error)}: mend it, leave {name} out{offline}") from error
        known = read_json(folder / IDS) if (folder / IDS).is_file() else {}
        write_json(folder / IDS, {**known, name: self._service.identity})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the finite values of a step."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._try(lambda service: service.log(step, finite))

    def close(self, *, failed: bool = False) -> None:
        """Send the remaining metrics and end the tracker's run."""
        self._try(lambda service: service.close(failed))

    def _try(self, call: Any) -> None:
        if self._service is None:
            return
        try:
            call(self._service)
        except Exception as error:
            self._service = None
            _log.warning(
                "%s failed and gets no further metrics; metrics.jsonl has all: %s", self._name, _first_line(error)
            )


class Wandb:
    """A run at Weights & Biases; the environment says where (`WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY`)."""

    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]):
        import wandb

        self.identity = identity
        # Console, command line and code are not recorded: they may hold secrets.
        options = wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        project, name = _project(settings, "WANDB_PROJECT"), _name(settings, folder)
        run = {"id": identity, "resume": "allow", "name": name, "project": project, "dir": str(folder)}
        self._run = wandb.init(**run, config=dict(settings), settings=options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send values."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run in Trackio's local database, or its Space; the environment says where (`TRACKIO_DIR`)."""

    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]):
        import trackio

        self.identity = identity
        project, name = _project(settings, "TRACKIO_PROJECT"), f"{_name(settings, folder)}-{identity}"
        self._run = trackio.init(
            project=project,
            name=name,
            resume="allow",
            config=dict(settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send values."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run."""
        self._run.finish()


class Mlflow:
    """A run of an MLflow server at `MLFLOW_TRACKING_URI`, by default of a database in the run's folder."""

    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]):
        from mlflow import MlflowClient

        local = folder.absolute() / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            local.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(uri or f"sqlite:///{local / 'mlflow.db'}")
        self._buffer: list[Any] = []
        self.identity = self._resume(identity) or self._start(folder, settings, None if uri else str(local))

    def _resume(self, identity: str) -> str | None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(identity, status="RUNNING")
        except MlflowException:  # a new identity, or a run deleted there
            return None
        return identity

    def _start(self, folder: Path, settings: Mapping[str, Any], artifacts: str | None) -> str:
        from mlflow.entities import Param

        name = _project(settings, "MLFLOW_EXPERIMENT_NAME")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifacts)
        run = self._client.create_run(experiment, run_name=_name(settings, folder)).info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in _flat(settings)]
        self._client.log_batch(run, params=params[:_MOST_BUFFERED])
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send values, many steps in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._buffer += [Metric(re.sub(r"[^\w\-. /:]", "_", key), value, now, step) for key, value in values.items()]
        if len(self._buffer) >= _MOST_BUFFERED:
            self._flush()

    def close(self, failed: bool) -> None:
        """Send the remaining metrics and end the run."""
        self._flush()
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")

    def _flush(self) -> None:
        buffer, self._buffer = self._buffer, []
        self._client.log_batch(self.identity, metrics=buffer)


_SERVICES: dict[str, Any] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def _project(settings: Mapping[str, Any], variable: str) -> str:
    """Return the run's project: its setting, else the tracker's variable, else the library's name."""
    given = settings.get("run", {}).get("log_project", NONE)
    return os.environ.get(variable, _PROJECT) if given == NONE else given


def _name(settings: Mapping[str, Any], folder: Path) -> str:
    """Return the run's name: its setting, else that of its folder."""
    given = settings.get("run", {}).get("log_name", NONE)
    return folder.name if given == NONE else given


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
