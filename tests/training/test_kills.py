"""Killed runs and exports end like undisturbed ones; `--kills 100` kills runs more often."""

from pathlib import Path

import flip_campaign
import kill_campaign
import pytest
from forked import Forked
from selection import thorough

_OTHERS = sorted(kill_campaign.CAMPAIGNS.keys() - {"sft"})


def run_campaign(main, folder: Path, *arguments: object) -> str:
    """Return the last line of a campaign that finds no fault."""
    campaign = Forked(folder / "campaign", main, [*map(str, arguments), "--work", str(folder / "work")])
    status, stdout, stderr = campaign.wait(1200)
    assert status == 0, stdout + stderr
    return stdout.splitlines()[-1]


@pytest.mark.long
def test_killed_runs_end_like_a_whole_one(tmp_path, pytestconfig):
    kills = pytestconfig.getoption("--kills")
    told = run_campaign(kill_campaign.main, tmp_path, "--kinds", "sft", "--kills", kills)
    assert told == f"{kills} kills, all equal"


@thorough("training/test_kills.py")
@pytest.mark.parametrize("kind", _OTHERS)
def test_killed_processes_of_all_kinds_end_like_whole_ones(kind, tmp_path):
    assert run_campaign(kill_campaign.main, tmp_path, "--kinds", kind, "--kills", 2) == "2 kills, all equal"


@thorough("training/test_kills.py")
@pytest.mark.parametrize("subject", flip_campaign.SUBJECTS)
def test_flipped_bits_of_what_is_read_again_change_nothing_silently(subject, tmp_path):
    told = run_campaign(flip_campaign.main, tmp_path, "--subjects", subject, "--flips", 2)
    assert told == "2 flips, all equal or refused"
