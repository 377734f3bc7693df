"""A step of reinforcement learning is timed in all its phases, on rows that the checks of a run accept."""

import json

import pytest
from selection import repeats_parts_of

TINY = ("--shape", "tiny", "--prompts", "2", "--answers", "2", "--longest", "8", "--row", "256", "--dtype", "float32")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--beta", "0.1"),
        ("--matmul", "fp8"),
        ("--quantize", "int8"),
        ("--shape", "tiny-moe", "--plain-experts"),
        ("--shape", "tiny-qwen3-moe", "--quantize", "nf4"),
    ],
)
def test_settings_of_recorded_commands_make_a_run(tmp_path, flags):
    import rl_step

    run = rl_step.make_run(rl_step.read_flags([*TINY, *flags]), tmp_path)
    assert run.rollouts.plan.description == "2 prompts × 2 answers of at most 8 tokens; reward: exact"
    run.rollouts.close()


@repeats_parts_of("test_settings_of_recorded_commands_make_a_run")
@pytest.mark.parametrize(
    "flags",
    [("--train-rows", "1", "--compared", "256"), ("--train-alone",), ("--shape", "tiny-qwen3.5", "--drafts", "2")],
)
def test_all_phases_end(tmp_path, monkeypatch, flags):
    import rl_step

    file = tmp_path / "step.json"
    monkeypatch.setattr("sys.argv", ["rl_step.py", *TINY, *flags, "--json", str(file)])
    rl_step.main()
    (results,) = json.loads(file.read_text())["results"]
    sampled = {"sampling", "packing", "comparison", "pass of 4 rows", "step"}
    assert "--drafts" not in flags or (results["drafts"]["made"] and results["times"]["step"] > 0)
    assert {"load", "training"} | (set() if "--train-alone" in flags else sampled) <= results.keys()
