"""A dry run refuses what the run would refuse before it trains, and changes nothing."""

import json
from types import SimpleNamespace

import pytest
from flax import nnx

from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export import save_model
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.training.run_folder import output_folder
from jaxglue.training.train import train


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def refused_alike(config, message):
    """Require the same error of a run and of its dry run."""
    for dry_run in (True, False):
        with pytest.raises((ValueError, OSError), match=message):
            train(config(dry_run=dry_run))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": True}, "--resume: .* holds no run to continue"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite exclude each other"),
        ({"output": "/dev/full"}, "output folder /dev/full is a file"),
    ],
)
def test_unusable_folders_are_refused(make_config, changes, message):
    refused_alike(lambda **more: make_config(**changes, **more), message)


def test_folders_that_cannot_be_made_are_refused(make_config, tmp_path):
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "run"
    refused_alike(lambda **more: make_config(output=output, **more), "cannot be made, as .*file is a file")


@pytest.mark.parametrize(("free", "is_told"), [(0, True), (1e9, False)])
def test_a_disk_without_room_for_a_checkpoint_is_told(make_config, monkeypatch, caplog, free, is_told):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    train(make_config(dry_run=True))
    assert ("a checkpoint takes up to 0.0 GB, and " in caplog.text) == is_told


def test_a_folder_in_use_or_with_a_run_is_refused(make_config, tmp_path):
    folder = tmp_path / "run"
    with output_folder(folder):
        (folder / "config.toml").touch()
        with pytest.raises(ValueError, match="is in use by process"):
            train(make_config(dry_run=True, resume=True))
    refused_alike(make_config, "holds a run: continue it with --resume, or replace it with --overwrite")
    refused_alike(lambda **more: make_config(overwrite=True, **more), "has no list of the files that its run wrote")


def test_a_resume_that_contradicts_the_checkpoint_is_refused(make_config, tmp_path):
    train(make_config(steps=2))
    before = contents(tmp_path / "run")
    train(make_config(steps=2, resume=True, dry_run=True))
    with pytest.raises(ValueError, match=r"cannot resume[\s\S]*lora.rank: saved 4, now 8"):
        train(make_config(steps=2, resume=True, dry_run=True, rank=8))
    with pytest.raises(ValueError, match="the run has done 2 steps, more than the 1 asked for"):
        train(make_config(steps=1, resume=True, dry_run=True))
    assert contents(tmp_path / "run") == before


@pytest.fixture
def weights_folder(model_folder):
    """Give the model folder weights."""
    model = random_model(config_from_hf(read_config(model_folder)))
    save_model(model_folder, flatten_names(split_model(model, nnx.Param)[1]), model_folder)
    return model_folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 32}, r"q_proj.weight in model.safetensors is \[32, 32\], config.json says \[64, 32\]"),
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"not part of the model: model\.layers\.1\."),
    ],
)
def test_shapes_that_contradict_the_weights_are_refused(make_config, weights_folder, monkeypatch, changes, message):
    train(make_config(random_weights=False, dry_run=True))
    path = weights_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    monkeypatch.setattr("jaxglue.training.weights.load_model", None)
    refused_alike(lambda **more: make_config(random_weights=False, **more), message)
