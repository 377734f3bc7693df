"""Killed runs end like undisturbed ones; `--kills 100` kills more often."""

import pytest
from forked import Forked
from training import kill_campaign

from jaxglue.settings.recipe import to_toml


@pytest.mark.long
def test_killed_runs_end_like_a_whole_one(make_config, tmp_path, xla_cache, pytestconfig):
    kills = pytestconfig.getoption("--kills")
    config = make_config(steps=6, save_every=2, compilation_cache=xla_cache, gradient_accumulation_steps=2)
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    campaign = Forked(tmp_path / "campaign", kill_campaign.main, [str(tmp_path / "recipe.toml"), "--kills", str(kills)])
    status, stdout, stderr = campaign.wait(60 * kills)
    assert status == 0, stderr
    assert f"{kills} kills" in stdout.splitlines()[-1]
