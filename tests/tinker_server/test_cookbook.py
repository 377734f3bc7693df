"""Recipes of tinker-cookbook run against the server as they are; slow, and only where JAXGLUE_COOKBOOK names their
Python: the virtual environment that `pip install tinker-cookbook` was run in."""

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


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    from jaxglue.tinker.server import TinkerServer

    folder = tmp_path_factory.mktemp("models") / "Qwen3-4B-Instruct-2507"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    server = TinkerServer(api_key=KEY, **{**SETTINGS, "model": str(folder), "seq_len": 2048})
    runner = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="warning"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}", folder
    runner.should_exit = True
    thread.join(10)
    server.close()


def run(recipe, url, logs):
    """Run a recipe to its end; return the lines of its metrics."""
    address, folder = url
    script = Path(__file__).parent / "cookbook_recipes.py"
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [PYTHON, str(script), recipe, address, str(folder), str(logs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def test_a_supervised_recipe_and_one_of_rewards_that_goes_on_from_its_state(url, tmp_path):
    lines = run("sl_loop", url, tmp_path / "logs")
    assert lines[-1]["train_mean_nll"] < 0.8 * lines[0]["train_mean_nll"]
    lines = run("rl_loop", url, tmp_path / "rl")
    assert [line["progress/batch"] for line in lines] == [0, 1, 2] and all("reward/total" in line for line in lines)


@pytest.mark.parametrize("recipe", ["rl_basic", "rl_numerics_check"])
def test_recipes_of_the_cookbooks_own_trainer(url, tmp_path, recipe):
    lines = run(recipe, url, tmp_path / "logs")
    assert len(lines) >= 2
    differences = [line["optim/kl_sample_train_v1"] for line in lines if "optim/kl_sample_train_v1" in line]
    assert differences and max(map(abs, differences)) < 1e-4
