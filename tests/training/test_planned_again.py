"""A first step that takes more memory than there is: planned again once, with nothing lost."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from selection import repeat

from jaxglue.engine.policy import parse_policies
from jaxglue.planner import calibration as fitted
from jaxglue.planner.gpus import GIB
from jaxglue.training import recovery, setup
from jaxglue.training.record import Memory
from jaxglue.training.recovery import OutOfMemory
from jaxglue.training.step import TrainStep
from jaxglue.training.train import train

LIMIT = 16.0
POOL = LIMIT - fitted.OUTSIDE_POOL / GIB
PLANNED = int(0.9 * POOL * GIB)


@pytest.fixture
def models() -> list[weakref.ref]:
    """References to the models of the steps that ran."""
    return []


@pytest.fixture
def planned(monkeypatch, models) -> list[float]:
    """Plan `dots` at first, and `full` afterwards, without the first model; list the GiB of the pool of later plans."""
    pools: list[float] = []
    choose = setup.choose_remat

    def chosen(settings, workload, steps, explain=False):
        return replace(choose(settings, workload, steps), device_bytes=PLANNED)

    def chosen_again(settings, workload, steps, *, pool):
        pools.append(pool)
        assert [model() for model in models] == [None]
        layers = workload.config.num_hidden_layers
        return replace(choose(settings, workload, steps), remat="full", policies=parse_policies("full", layers))

    monkeypatch.setattr(setup, "choose_remat", chosen)
    monkeypatch.setattr(recovery, "choose_remat", chosen_again)
    return pools


@pytest.fixture
def overrun(monkeypatch, models) -> Callable[[str, int], None]:
    """Make the first steps of some processes overrun: an allocation fails in their midst, or the peak is too high."""
    dispatch, steps = TrainStep.dispatch, [0]

    def make(kind: str, times: int) -> None:
        def dispatched(self, *args):
            result = dispatch(self, *args)
            models.append(weakref.ref(self))
            steps[0] += 1
            if kind == "exhausted" and steps[0] <= times:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.")
            return result

        def memory_use(devices):
            return Memory(0, int((POOL * 1.25 if steps[0] <= times else 1) * GIB), "device")

        steps[0] = 0
        models.clear()
        monkeypatch.setattr(TrainStep, "dispatch", dispatched)
        monkeypatch.setattr(recovery, "memory_use", memory_use if kind == "peak" else recovery.memory_use)

    return make


def results(folder) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Return the lines of metrics, without times, and the adapter."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines]
    return kept, load_file(folder / "adapter" / "adapter_model.safetensors")


def assert_equal(one, other) -> None:
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


@pytest.mark.parametrize("kind", [repeat("exhausted"), "peak"])
def test_an_overrun_is_planned_again_with_the_results_of_that_plan(
    make_config, tmp_path, planned, overrun, capsys, kind
):
    train(make_config(steps=2, remat="full", output=tmp_path / "full"))
    overrun(kind, 1)
    train(make_config(steps=2, memory_limit=LIMIT, output=tmp_path / "again"))
    assert_equal(results(tmp_path / "again"), results(tmp_path / "full"))
    share = {"exhausted": 0.8, "peak": PLANNED / (1.25 * POOL * GIB)}[kind]
    assert planned == [pytest.approx(share * POOL, rel=1e-3)]
    printed = " ".join(capsys.readouterr().out.split())
    said = {"exhausted": "asked for", "peak": "took 19.1 GiB of the GPU"}[kind]
    assert f"the first step {said}" in printed and "above the 15.3 that --memory-limit 16 leaves" in printed
    assert "(13.8 planned): planned again and started again, with --remat full" in printed


def test_a_resumed_run_is_planned_again(make_config, tmp_path, planned, overrun):
    options = {"memory_limit": LIMIT, "schedule": "constant"}
    train(make_config(steps=3, remat="full", output=tmp_path / "whole", **options))
    train(make_config(steps=2, remat="full", output=tmp_path / "again", **options))
    overrun("exhausted", 1)
    train(make_config(steps=3, resume=True, output=tmp_path / "again", **options))
    assert_equal(results(tmp_path / "again"), results(tmp_path / "whole"))


@pytest.mark.parametrize("kind", [repeat("exhausted"), "peak"])
def test_a_second_overrun_ends_the_run_with_a_remedy(make_config, tmp_path, planned, overrun, monkeypatch, kind):
    train(make_config(steps=1))
    before, recipe = results(tmp_path / "run"), (tmp_path / "run" / "config.toml").read_text()
    monkeypatch.setattr(recovery, "_remedy", lambda run: "--remat offload would fit")
    overrun(kind, 2)
    line = {
        "exhausted": "ran out of memory, .*planned was --remat 'full'",
        "peak": r"took 19\.1 GiB .* though planned for the second time: start again with --memory-limit 1\d\.\d, or",
    }[kind]
    with pytest.raises(OutOfMemory, match=line):
        train(make_config(steps=2, memory_limit=LIMIT, overwrite=True))
    assert_equal(results(tmp_path / "run"), before)
    assert (tmp_path / "run" / "config.toml").read_text() == recipe


def test_a_named_policy_is_not_replaced(make_config, planned, overrun, capsys):
    overrun("exhausted", 1)
    with pytest.raises(OutOfMemory, match="planned was --remat 'dots'"):
        train(make_config(steps=1, memory_limit=LIMIT, remat="dots"))
    overrun("peak", 1)
    train(make_config(steps=1, memory_limit=LIMIT, remat="dots", overwrite=True))
    said = " ".join(capsys.readouterr().out.split())
    assert "where no more is free, start again with --memory-limit 1" in said and "or change --remat" in said
    assert not planned
