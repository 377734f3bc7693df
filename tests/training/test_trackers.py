"""Experiment trackers, offline with their real packages, and masked secrets."""

import json
import logging

import pytest

from jaxglue.settings.secrets import masked
from jaxglue.training import trackers
from jaxglue.training.config import RunConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.trackers import IDS, check_trackers, open_loggers
from jaxglue.training.train import train

SECRET = "a-secret-of-the-environment"
SETTINGS = {"run": {"steps": 4}, "model": {"model": "m"}}


def write(folder, name, steps, **options):
    folder.mkdir(exist_ok=True)
    with open_loggers(folder, trackers=(name,), settings=SETTINGS, **options) as loggers:
        for step in steps:
            loggers.log(
                step, {"loss": 1.0 / step, "eval_loss/a (1).jsonl": 2.0, "mfu": None, "grad_norm": float("nan")}
            )
    return json.loads((folder / IDS).read_text())[name]


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    identity = write(tmp_path / "run", "wandb", [1, 2])
    assert write(tmp_path / "run", "wandb", [3], resume_step=2) == identity
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}"))) >= 1
    assert write(tmp_path / "run", "wandb", [1]) != identity


def test_trackio_writes_a_local_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    identity = write(tmp_path / "run", "trackio", [1, 2])
    assert write(tmp_path / "run", "trackio", [3], resume_step=2) == identity


def test_mlflow_writes_a_local_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    identity = write(tmp_path / "run", "mlflow", [1, 2])
    assert write(tmp_path / "run", "mlflow", [3], resume_step=2) == identity
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}")
    run = client.get_run(identity)
    assert run.data.params == {"run.steps": "4", "model.model": "m"}
    assert (run.info.status, set(run.data.metrics)) == ("FINISHED", {"loss", "eval_loss/a _1_.jsonl"})
    assert [point.step for point in client.get_metric_history(identity, "loss")] == [1, 2, 3]


class Broken:
    identity = "x"

    def __init__(self, *_):
        pass

    def log(self, *_):
        raise OSError("no route to host\nmore")

    close = log


def test_a_failing_tracker_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(trackers._SERVICES, "wandb", Broken)
    with caplog.at_level(logging.WARNING):
        write(tmp_path, "wandb", [1, 2])
    assert caplog.text.count("wandb failed and gets no further metrics; metrics.jsonl has all: no route to host") == 1
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_tracker_that_cannot_start_is_one_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no API key\nmore")

    monkeypatch.setitem(trackers._SERVICES, "wandb", refuse)
    with pytest.raises(
        ValueError, match=r"^--log-to wandb: no API key: mend it, leave wandb out, or set WANDB_MODE=off"
    ):
        write(tmp_path, "wandb", [1])


def test_names_are_checked(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--log-to wandb needs the package wandb: pip install '\.\[wandb\]'"):
        check_trackers(("tensorboard", "wandb"))
    with pytest.raises(ValueError, match=r"--log-to wanbd: expected tensorboard, .* or none; did you mean wandb"):
        check_trackers(("wanbd",))


@pytest.mark.parametrize(
    ("given", "names"),
    [(("wandb, mlflow", "wandb"), ("wandb", "mlflow")), (("none",), ()), (("tensorboard",), ("tensorboard",))],
)
def test_names_may_be_separated_by_commas(given, names):
    assert RunConfig(log_to=given).trackers == names


def test_secrets_are_masked():
    environment = {"WANDB_API_KEY": SECRET, "TOKENIZERS_PARALLELISM": "everything", "USE_KEY": "1", "PWD": "/a/b/c/d/e"}
    token = "hf_" + "a" * 30
    settings = {"a": [f"say {SECRET}", {"b": f"https://me:{token}@host/x"}], "c": 1, "d": "everything 1 /a/b/c/d/e"}
    assert masked(settings, environment) == {"a": ["say ***", {"b": "https://***@host/x"}], "c": 1, "d": settings["d"]}
    for name in ("PGPASSWORD", "DB_PASS", "MYSQL_PWD", "db_password", "SSHPASSPHRASE", "GH_PAT", "MYAPIKEY"):
        assert masked(SECRET, {name: SECRET}) == "***"
    for name in ("OLDPWD", "COMPASS", "KEYBOARD", "BYPASS", "PGPASSFILE"):
        assert masked(SECRET, {name: SECRET}) == SECRET


def test_a_run_folder_holds_no_secret(make_config, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    seen = {}

    class Service(Broken):
        def __init__(self, folder, identity, settings):
            seen.update(settings)

        def log(self, *_):
            pass

        close = log

    monkeypatch.setitem(trackers._SERVICES, "mlflow", Service)
    monkeypatch.setitem(trackers.PACKAGES, "mlflow", None)
    train(make_config(steps=1, system=f"My key is {SECRET}.", log_to=("mlflow",)))
    assert seen["data"]["system"] == "My key is ***."
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not (tmp_path / "run" / "tensorboard").exists()
