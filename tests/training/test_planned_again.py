"""A run that takes more memory than there is: planned again, with nothing lost."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from selection import repeat, repeats_parts_of

from jaxglue.engine.policy import parse_policies
from jaxglue.planner import calibration as fitted
from jaxglue.planner.gpus import GIB
from jaxglue.training import out_of_memory, remat
from jaxglue.training.out_of_memory import OutOfMemory
from jaxglue.training.record import MemoryUse
from jaxglue.training.step import train_step
from jaxglue.training.train import train

LIMIT = 16.0
POOL = LIMIT - fitted.OUTSIDE_POOL / GIB
PLANNED = int(0.9 * POOL * GIB)


@pytest.fixture
def models() -> list[weakref.ref]:
    """References to the models of the steps that ran."""
    return []


@pytest.fixture
def planned(monkeypatch, models) -> dict:
    """Plan `dots` at first, `remat` afterwards, when the model before is gone; list later plans' GiB of the pool."""
    plans: dict = {"remat": "full", "pools": []}
    choose = remat.choose_remat

    def chosen(settings, workload, steps, explain=False):
        return replace(choose(settings, workload, steps), device_bytes=PLANNED)

    def chosen_again(settings, workload, steps, *, pool):
        plans["pools"].append(pool)
        assert {model() for model in models} == {None}
        policies = parse_policies(plans["remat"], workload.config.num_hidden_layers)
        again = replace(choose(settings, workload, steps), remat=plans["remat"], policies=policies)
        return replace(again, device_bytes=int(0.95 * pool * GIB))

    monkeypatch.setattr(remat, "choose_remat", chosen)
    monkeypatch.setattr(out_of_memory, "choose_remat", chosen_again)
    return plans


@pytest.fixture
def overrun(monkeypatch, models) -> Callable[..., None]:
    """Make steps of these numbers, counted over attempts, overrun: in their midst, or by their peak."""
    steps = [0]

    def make(kind: str, *numbers: int) -> None:
        def dispatched(parts, *args):
            result = train_step(parts, *args)
            models.append(weakref.ref(parts))
            steps[0] += 1
            if kind == "exhausted" and steps[0] in numbers:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.")
            return result

        def memory_use(devices):
            return MemoryUse(0, int((POOL * 1.25 if steps[0] in numbers else 1) * GIB), "device")

        steps[0] = 0
        models.clear()
        monkeypatch.setattr("jaxglue.training.loop.train_step", dispatched)
        monkeypatch.setattr(out_of_memory, "memory_use", memory_use if kind == "peak" else out_of_memory.memory_use)

    return make


def results(folder) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Return the lines of metrics, without times, and the adapter."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines]
    return kept, load_file(folder / "adapter" / "adapter_model.safetensors")


def assert_equal(one, other) -> None:
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


@pytest.mark.parametrize(
    ("kind", "number", "share"),
    [repeat("exhausted", 1, 0.8), ("exhausted", 2, 0.8), repeat("peak", 1, PLANNED / POOL / GIB / 1.25)],
)
def test_an_overrun_is_planned_again_with_the_results_of_that_plan(
    make_config, tmp_path, planned, overrun, capsys, kind, number, share
):
    """Also in the second step, with no checkpoint before: then from the start."""
    train(make_config(steps=2, remat="full", output=tmp_path / "full"))
    overrun(kind, number)
    train(make_config(steps=2, memory_limit=LIMIT, output=tmp_path / "again"))
    assert_equal(results(tmp_path / "again"), results(tmp_path / "full"))
    assert planned["pools"] == [pytest.approx(share * POOL, rel=1e-3)]
    printed = " ".join(capsys.readouterr().out.split())
    said = {"exhausted": "the run asked for", "peak": "the first step took 19.1 GiB of the GPU"}[kind]
    assert said in printed and "above the 15.3 that --memory-limit 16 leaves" in printed
    assert "(13.8 planned): planned again and started again, with --remat full" in printed


@repeats_parts_of("test_an_overrun_is_planned_again_with_the_results_of_that_plan")
def test_an_overrun_after_a_checkpoint_goes_on_from_there(make_config, tmp_path, planned, overrun, capsys):
    planned["remat"] = "dots"
    train(make_config(steps=4, remat="dots", output=tmp_path / "whole", save_every=2))
    overrun("exhausted", 4)
    train(make_config(steps=4, output=tmp_path / "again", save_every=2))
    assert_equal(results(tmp_path / "again"), results(tmp_path / "whole"))
    assert "resumed from step 2" in capsys.readouterr().out and len(planned["pools"]) == 1


@repeats_parts_of("test_an_overrun_is_planned_again_with_the_results_of_that_plan")
def test_a_resumed_run_is_planned_again(make_config, tmp_path, planned, overrun):
    options = {"memory_limit": LIMIT, "schedule": "constant"}
    train(make_config(steps=3, remat="full", output=tmp_path / "whole", **options))
    train(make_config(steps=2, remat="full", output=tmp_path / "again", **options))
    overrun("exhausted", 1)
    train(make_config(steps=3, resume=True, output=tmp_path / "again", **options))
    assert_equal(results(tmp_path / "again"), results(tmp_path / "whole"))


@repeats_parts_of("test_an_overrun_is_planned_again_with_the_results_of_that_plan")
@pytest.mark.parametrize("kind", [repeat("exhausted"), "peak"])
def test_overruns_of_all_plans_end_the_run_with_a_remedy(make_config, tmp_path, planned, overrun, monkeypatch, kind):
    train(make_config(steps=1))
    before, recipe = results(tmp_path / "run"), (tmp_path / "run" / "config.toml").read_text()
    monkeypatch.setattr(out_of_memory, "_remedy", lambda run: "--remat offload would fit")
    overrun(kind, 1, 2, 3, 4)
    line = {
        "exhausted": "ran out of memory, .*planned was --remat 'full'",
        "peak": r"took 19\.1 GiB .* though planned 3 times more: start again with --memory-limit \d+\.\d, or",
    }[kind]
    with pytest.raises(OutOfMemory, match=line):
        train(make_config(steps=2, memory_limit=LIMIT, overwrite=True))
    assert_equal(results(tmp_path / "run"), before)
    assert (tmp_path / "run" / "config.toml").read_text() == recipe
    assert len(planned["pools"]) == 3 and planned["pools"] == sorted(planned["pools"], reverse=True)


def test_a_named_policy_is_not_replaced(make_config, planned, overrun, capsys):
    overrun("exhausted", 1)
    with pytest.raises(OutOfMemory, match="planned was --remat 'dots'"):
        train(make_config(steps=1, memory_limit=LIMIT, remat="dots"))
    overrun("peak", 1)
    train(make_config(steps=1, memory_limit=LIMIT, remat="dots", overwrite=True))
    said = " ".join(capsys.readouterr().out.split())
    assert "where no more is free, start again with --memory-limit 1" in said and "or change --remat" in said
    assert not planned["pools"]
