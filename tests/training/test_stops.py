"""Runs stopped from outside save a checkpoint and end with the status of their signal; one under `nohup` goes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxglue.recipe import to_toml

STEPS = 9
STATUSES = {"interrupt": 130, "terminate": 143, "hang_up": 129, "hang_up_ignored": 0, "close_pipe": 141}


@pytest.mark.slow
def test_stopped_runs_are_saved_and_tell_why_they_ended(make_config, tmp_path, xla_cache):
    config = make_config(steps=STEPS, save_every=STEPS, compilation_cache=xla_cache)
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    command = [sys.executable, str(Path(__file__).with_name("stop_campaign.py")), str(tmp_path / "recipe.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = {end["stop"]: end for end in map(json.loads, done.stdout.splitlines())}
    assert {stop: end["status"] for stop, end in ends.items()} == STATUSES
    for stop, end in ends.items():
        assert "traceback" not in end["output"].lower(), end["output"]
        (saved,) = map(int, end["saved"])
        assert saved == STEPS if stop == "hang_up_ignored" else 3 <= saved < STEPS, stop
    assert "SIGTERM: saving a checkpoint" in ends["terminate"]["output"]
