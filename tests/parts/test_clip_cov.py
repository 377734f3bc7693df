"""A loss of sampled answers in a file of its own, with settings, advantages and a metric, by the commands alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from selection import repeats_parts_of

PARTS = Path(__file__).with_name("clip_cov.py")
SIZES = {"steps": 4, "num_generations": 4, "generation_batch_size": 16, "batch_size": 1, "save_every": 1}
LOSS = {"objective": "clip_cov", "clip_cov_share": 1.0, "clip_cov_least": 0.01, "reward": "regex?pattern=[0-4]"}
TRAIN = ("train", "--recipe", "quickstart-grpo", "--method", "lora", "--parts", PARTS)


def start(*arguments, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxglue", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(*arguments, folder: Path) -> str:
    process = start(*arguments, folder=folder)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def flags(output: str) -> list[str]:
    settings = {**SIZES, **LOSS, "log_every": 1, "output": output}
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@repeats_parts_of("test_a_metric_joins_those_of_the_loss_that_is_extended")
def test_a_loss_of_its_own_trains_is_killed_resumed_exported_and_generates(tmp_path):
    run(*TRAIN, *flags("whole"), folder=tmp_path)
    killed = start(*TRAIN, *flags("killed"), folder=tmp_path)
    while len(metrics(tmp_path / "killed")) < 2 and killed.poll() is None:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    run(*TRAIN, *flags("killed"), "--resume", folder=tmp_path)
    adapters = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "killed")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    lines = metrics(tmp_path / "whole")
    assert len(lines) == 4 and any(0 < line["clip_cov/share"] < 1 for line in lines)
    answers = [json.loads(line) for line in (tmp_path / "whole" / "rollouts.jsonl").read_text().splitlines()]
    for first in range(0, len(answers), 4):
        rewards = [answer["rewards"]["regex"] for answer in answers[first : first + 4]]
        expected = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
        assert [answer["advantage"] for answer in answers[first : first + 4]] == pytest.approx(expected, abs=1e-4)
    export = ("export", "--run", "killed", "--checkpoint", "last", "--parts", PARTS, "--output", "exported")
    run(*export, folder=tmp_path)
    generate = ("generate", "--adapter", "exported", "--raw", "--prompt", "7 3 second =", "--max-tokens", 3)
    assert run(*generate, "--temperature", 0, folder=tmp_path).strip()
