"""The table and the errors of scripts/estimate.py."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "estimate.py"


@pytest.fixture
def estimate(tiny_config, tmp_path, monkeypatch, capsys):
    """estimate(*flags) → the script's output for a tiny model."""
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config, "model_type": "qwen3", "num_hidden_layers": 2}))

    def make(*flags):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--model", str(tmp_path), "--seq-len", "256", *flags])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return make


def test_estimate_prints_presets_and_the_choice_of_auto(estimate):
    printed = estimate("--gpu", "RTX 4090")
    assert "RTX 4090: 21.6 GiB" in printed
    assert all(name in printed for name in ("none", "dots", "full", "offload"))
    assert "auto: --remat" in printed and "…" not in printed


def test_estimate_refuses_an_unknown_gpu(estimate):
    with pytest.raises(SystemExit, match="GPU 'Voodoo' is unknown: use one of"):
        estimate("--gpu", "Voodoo")
