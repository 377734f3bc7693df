"""The table and the errors of `jaxglue estimate`."""

import json

import pytest

from jaxglue.commands import main


@pytest.fixture
def estimate(tiny_config, tmp_path, capsys):
    """estimate(*flags) → the command's output for a tiny model."""
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config, "model_type": "qwen3", "num_hidden_layers": 2}))

    def make(*flags):
        main(["estimate", "--model", str(tmp_path), "--seq-len", "256", *flags])
        return capsys.readouterr().out

    return make


def test_estimate_prints_presets_and_the_choice_of_auto(estimate):
    printed = estimate("--gpu", "RTX 4090")
    assert "RTX 4090: 21.6 GiB" in printed
    assert all(name in printed for name in ("none", "dots", "full", "offload"))
    assert "auto: --remat" in printed and "…" not in printed


def test_estimate_refuses_an_unknown_gpu(estimate, capsys):
    with pytest.raises(SystemExit):
        estimate("--gpu", "Voodoo")
    assert "GPU 'Voodoo' is unknown: use one of" in capsys.readouterr().err
