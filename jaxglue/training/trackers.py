"""Experiment trackers: Weights & Biases, Trackio and MLflow, each by its own package."""

import importlib.util
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxglue.hf.files import write_json
from jaxglue.json_file import read_json
from jaxglue.spelling import nearest

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
        quiet: dict[str, Any] = {"console": "off", "silent": True, "save_code": False, "disable_git": True}
        options = wandb.Settings(**quiet, x_disable_meta=True, x_save_requirements=False)
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        run = {"id": identity, "resume": "allow", "name": folder.name, "project": project, "dir": str(folder)}
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
        project, name = os.environ.get("TRACKIO_PROJECT", _PROJECT), f"{folder.name}-{identity}"
        plain: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project=project, name=name, resume="allow", config=dict(settings), **plain)

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

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifacts)
        run = self._client.create_run(experiment, run_name=folder.name).info.run_id
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


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
