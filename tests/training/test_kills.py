"""Killed runs end like undisturbed ones; `--kills 100` kills more often."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxglue.recipe import to_toml


@pytest.mark.slow
def test_killed_runs_end_like_a_whole_one(make_config, tmp_path, xla_cache, pytestconfig):
    kills = pytestconfig.getoption("--kills")
    config = make_config(steps=6, save_every=2, compilation_cache=xla_cache, gradient_accumulation_steps=2)
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    command = [sys.executable, str(Path(__file__).with_name("kill_campaign.py")), str(tmp_path / "recipe.toml")]
    done = subprocess.run([*command, "--kills", str(kills)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills" in done.stdout.splitlines()[-1]
