"""A step of reinforcement learning is timed in all its phases, on rows that the checks of a run accept."""

import json
from contextlib import contextmanager

import jax
import pytest
from selection import repeats_parts_of

from jaxglue.rl import sampler
from jaxglue.training import rollout_policy

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


def test_sampling_is_planned_and_moves_moments_as_in_a_run(tmp_path, monkeypatch):
    import rl_step

    noted = []

    class Idle:
        bytes = 2**30

        def __init__(self, policy, *_):
            self._policy = policy

        def pays_moving(self, slots, more):
            return more > slots

        @contextmanager
        def moved(self):
            noted.append("out")
            yield
            noted.append("back")
            state = self._policy.state
            self._policy.state = state._replace(optimizer=jax.tree.map(lambda x: x.copy(), state.optimizer))

    monkeypatch.setattr(rollout_policy, "idle_moments", lambda run, policy: Idle(policy))
    monkeypatch.setattr(sampler, "free_bytes", lambda *, device: 2e5)
    bench = rl_step.Benchmark(rl_step.read_flags(TINY), tmp_path)
    bench.sample()
    assert noted == ["out", "back"] and bench.slots == 4
    assert bench.state is bench._policy.state
    bench.run.rollouts.close()
