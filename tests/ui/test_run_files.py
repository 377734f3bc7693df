"""A run's files are read whole, or sampled where they are long; a line that is being written is left for later."""

import json

import pytest
from run_folders import make_run, rollouts, write_lines

from jaxglue.ui import run_files
from jaxglue.ui.run_files import read_metrics, read_rollouts, read_run, version_of


def test_a_run_has_its_metrics_samples_and_results(runs):
    run = read_run(runs[2])
    assert len(run.metrics) == 21 and run.summary["last_loss"] == 1.0 and run.results == ["adapter"]
    assert len(run.rollouts) == 80 and "log_probs" not in run.rollouts[0]
    assert run.sampled == {"metrics": False, "rollouts": False} and run.settings["objective"] == {"objective": "grpo"}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run: name the --output of one"):
        read_run(tmp_path)


def test_broken_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2}\n[1]\n\xff\xfe\n' + b"[" * 5000 + b'\n{"step": 2, "lo')
    assert read_metrics(path) == ([{"step": 1, "loss": 2}], False)


def test_long_metrics_are_sampled_with_every_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_WHOLE", 1000)
    monkeypatch.setattr(run_files, "_POINTS", 50)
    lines = [
        {"step": step, "loss": float(step)} | ({"eval_loss": 1.0} if step % 500 == 0 else {}) for step in range(1, 3001)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    found, is_part = read_metrics(tmp_path / "metrics.jsonl")
    steps = [line["step"] for line in found]
    assert is_part and len(found) < 60 and steps == sorted(set(steps))
    assert steps[0] == 1 and steps[-1] == 3000 and {500, 1000, 1500, 2000, 2500} <= set(steps)


def test_long_rollouts_are_whole_steps_with_the_first_and_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_WHOLE", 1000)
    monkeypatch.setattr(run_files, "_STEPS", 5)
    write_lines(tmp_path / "rollouts.jsonl", rollouts(200))
    found, is_part = read_rollouts(tmp_path / "rollouts.jsonl")
    steps = [line["step"] for line in found]
    assert is_part and {steps.count(step) for step in steps} == {4} and {1, 200} <= set(steps) and len(set(steps)) <= 7


def test_the_version_follows_the_files(tmp_path):
    folder = make_run(tmp_path / "run")
    before = version_of(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 21, "loss": 1}) + "\n")
    assert version_of(folder) != before == before
