"""Recipes of tinker-cookbook run against the server as they are; slow, and only where JAXGLUE_COOKBOOK names their
Python: that of a virtual environment with `pip install tinker-cookbook sympy pylatexenc math-verify`."""

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from selection import thorough

pytest.importorskip("starlette")
import uvicorn

from tests.tinker_server.test_server import KEY, MODEL, SETTINGS

PYTHON = os.environ.get("JAXGLUE_COOKBOOK")
pytestmark = [
    thorough("tinker_server/test_server.py"),
    pytest.mark.skipif(PYTHON is None, reason="JAXGLUE_COOKBOOK names no Python with tinker-cookbook"),
]


SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
SCRIPT = Path(__file__).parent / "cookbook_recipes.py"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    from jaxglue.tinker.server import TinkerServer

    folder = tmp_path_factory.mktemp("models") / "Qwen3-4B-Instruct-2507"
    shutil.copytree(MODEL, folder)
    call("tokenizer", "-", folder, "-")
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    config = json.loads((folder / "config.json").read_text()) | SHAPE | {"vocab_size": len(words)}
    (folder / "config.json").write_text(json.dumps(config))
    server = TinkerServer(api_key=KEY, **{**SETTINGS, "model": str(folder), "seq_len": 512})
    runner = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="warning"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}", folder
    runner.should_exit = True
    thread.join(10)
    server.close()


def call(*arguments):
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [PYTHON, SCRIPT, *arguments]
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def run(recipe, url, logs, *state):
    """Run a recipe to its end; return the lines of its metrics."""
    address, folder = url
    call(recipe, address, folder, logs, *state)
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def learned(url, tmp_path_factory):
    """The metrics of supervised steps, of which the later half goes on from a state, and the last state."""
    logs = tmp_path_factory.mktemp("logs")
    run("sl_loop", url, logs)
    states = logs / "checkpoints.jsonl"
    states.write_text(states.read_text().splitlines()[0] + "\n")
    lines = run("sl_loop", url, logs)
    return lines, json.loads(states.read_text().splitlines()[-1])["state_path"]


def test_a_supervised_recipe_that_goes_on_from_its_state(learned):
    lines, _ = learned
    assert [line["step"] for line in lines] == [*range(16), *range(8, 16)]
    assert lines[15]["train_mean_nll"] < 0.5 * lines[0]["train_mean_nll"]
    for line, again in zip(lines[8:16], lines[16:], strict=True):
        assert again["train_mean_nll"] == pytest.approx(line["train_mean_nll"], rel=1e-4)


def test_a_loop_of_rewards(url, tmp_path):
    lines = run("rl_loop", url, tmp_path)
    assert [line["progress/batch"] for line in lines] == [0, 1, 2] and all("reward/total" in line for line in lines)


@pytest.mark.parametrize("recipe", ["rl_basic", "rl_numerics_check"])
def test_recipes_of_the_cookbooks_own_trainer(url, learned, tmp_path, recipe):
    lines = run(recipe, url, tmp_path, learned[1])
    steps = [line for line in lines if "optim/kl_sample_train_v1" in line]
    assert len(steps) == 2 and any(line["grad_norm"] > 0 for line in steps)
    assert max(abs(line["optim/kl_sample_train_v1"]) for line in steps) < 1e-5
    if recipe == "rl_numerics_check":
        assert max(line["env/all/turns_per_episode"] for line in steps) > 1
        assert all(line["env/all/extension_rate"] == 1 for line in steps)
