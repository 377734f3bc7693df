"""Runs stopped from outside save a checkpoint and end with the status of their signal; one under `nohup` goes on."""

import json

import pytest
from forked import Forked
from training import stop_campaign

from jaxglue.settings.recipe import to_toml

STEPS = 9
STATUSES = {"interrupt": 130, "terminate": 143, "hang_up": 129, "hang_up_ignored": 0, "close_pipe": 141}


@pytest.mark.long
def test_stopped_runs_are_saved_and_tell_why_they_ended(make_config, tmp_path, xla_cache):
    config = make_config(steps=STEPS, save_every=STEPS, compilation_cache=xla_cache)
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    status, stdout, stderr = Forked(tmp_path / "campaign", stop_campaign.main, tmp_path / "recipe.toml").wait(300)
    assert status == 0, stderr
    ends = {end["stop"]: end for end in map(json.loads, stdout.splitlines())}
    assert {stop: end["status"] for stop, end in ends.items()} == STATUSES
    for stop, end in ends.items():
        assert "traceback" not in end["output"].lower(), end["output"]
        (saved,) = map(int, end["saved"])
        assert saved == STEPS if stop == "hang_up_ignored" else 3 <= saved < STEPS, stop
    assert "SIGTERM: saving a checkpoint" in ends["terminate"]["output"]
