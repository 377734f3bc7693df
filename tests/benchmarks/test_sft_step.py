"""Every engine reads the same batches; ours trains on them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def prepared(tmp_path):
    """(row, files) of the tiny row with three batches."""
    import sft_step

    return sft_step.ROWS["tiny"], sft_step.Inputs(tmp_path, ["tiny"], warm_up=1, steps=2).prepare("tiny")[0]


def test_a_document_never_predicts_the_next_ones_first_token(prepared):
    import sft_ours

    row, files = prepared
    with np.load(files["batches"]) as stored:
        tokens, lengths = stored["tokens"], stored["lengths"]
    assert (lengths.sum(1) == row.tokens).all()
    batches = sft_ours.read_batches(files["batches"])
    assert len({batch.segments.cu_seqlens.shape for batch in batches}) == 1
    for batch, ids, sizes in zip(batches, tokens, lengths, strict=True):
        start = 0
        for size in sizes[sizes > 0]:
            assert (batch.targets[0, start : start + size - 1] == ids[start + 1 : start + size]).all()
            assert batch.loss_weights[0, start : start + size].tolist() == [1.0] * (size - 1) + [0.0]
            start += size


@pytest.mark.slow
def test_ours_learns_and_results_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    import sft_step

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    flags = ["--rows", "tiny", "--engines", "ours", "--scratch", str(tmp_path), "--warm-up", "1", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["sft_step.py", *flags, "--json", str(tmp_path / "out.json")])
    sft_step.main()
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(result["losses"]) == 4 and len(result["ms_all"]) == 3
    assert result["losses"][0] == pytest.approx(np.log(2048), rel=0.05)
    assert "| tiny | ours |" in capsys.readouterr().out
    assert not Path(tmp_path / "tiny").exists()  # weights are large


def test_losses_are_compared_step_by_step():
    import sft_step

    ours = {"row": "r", "engine": "ours", "losses": [2.0, 1.0]}
    (row,) = sft_step.loss_differences([ours, {"row": "r", "engine": "peft", "losses": [2.0, 1.25]}])
    assert row["largest |Δ|"] == "2.5e-01" and row["of the loss"] == "2.0e-01"
