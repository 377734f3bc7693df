import io
from dataclasses import replace
from pathlib import Path

from jaxglue.terminal.console import Console
from jaxglue.training.report import RunSummary, print_panel, summary_rows

SUMMARY = RunSummary(
    startup_seconds={"data": 1.0},
    steps=1200,
    first_loss=3.5,
    last_loss=1.25,
    best_eval_loss=1.5,
    best_eval_step=1000,
    tokens_per_second=11234.5,
    mfu=0.5,
    peak_memory_gb=18.84,
    seconds=61,
    adapter=Path("run/[adapter]"),
    checkpoints=None,
    metrics=Path("run/metrics.jsonl"),
    curve=Path("run/loss.png"),
)


def printed(rows) -> str:
    console = Console(file=io.StringIO(), width=60)
    print_panel(console, "done", rows)
    return console.file.getvalue()


def test_summary_shows_results_and_paths():
    text = printed(summary_rows(SUMMARY))
    for part in (
        "3.5000 → 1.2500 in 1,200 steps",
        "1.5000 at step 1,000",
        "11,234",
        "50.0%",
        "18.8 GB",
        "1:01",
        "run/[adapter]",
        "run/metrics.jsonl",
        "run/loss.png",
    ):
        assert part in text
    assert "checkpoints" not in text


def test_unmeasured_results_are_left_out():
    text = printed(summary_rows(replace(SUMMARY, mfu=None, best_eval_loss=None, best_eval_step=None)))
    assert "MFU" not in text
    assert "eval" not in text


def test_long_value_is_folded():
    assert printed({"path": "x" * 100}).count("x") == 100


def test_rewards_stand_in_place_of_the_loss():
    text = printed(summary_rows(replace(SUMMARY, first_reward=0.0156, last_reward=0.75, page=Path("run/run.html"))))
    assert "0.0156 → 0.75 in 1,200 steps" in text
    assert "run/run.html" in text
    assert "loss   " not in text.replace("eval loss", "")


def test_a_trained_model_is_called_one():
    rows = summary_rows(replace(SUMMARY, adapter=Path("run/model"), adapter_step=1200))
    assert rows["model"] == "run/model (step 1,200)"
    assert "adapter" not in rows
