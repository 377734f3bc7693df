"""Host time of a step, and of the first one."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxglue.engine.policy import parse_policies
from jaxglue.planner.gpus import GIB, RECORDED, Dispatch
from jaxglue.planner.plan import Plan
from jaxglue.planner.planner import first_to_start
from jaxglue.planner.rates import measure_dispatch
from jaxglue.planner.step import LayerArrays, choose_group, compile_seconds, micro_batch, pinning_seconds


def _layers(count: int, **arrays):
    return [LayerArrays(trainable=14, frozen=9, **arrays)] * count


def _seconds(gpu_seconds: float, layers, *programs: int, host=RECORDED, **options) -> float:
    return micro_batch(gpu_seconds, layers, *programs, **options).seconds(host)


def test_short_steps_take_the_hosts_time():
    plain = _seconds(0.001, _layers(32))
    assert _seconds(10.0, _layers(32)) == pytest.approx(10, rel=0.01)
    assert _seconds(0.001, [LayerArrays(trainable=14, frozen=30)] * 32) > 1.1 * plain
    assert _seconds(0.001, _layers(32, offloaded=1)) > plain
    assert _seconds(0.001, _layers(32, streamed=True)) > _seconds(0.001, _layers(32, offloaded=1))
    layers = _layers(32, kernels=50)
    grouped, whole = _seconds(0.001, layers, 8), _seconds(0.001, layers, 32, one_program=True)
    assert whole < grouped < _seconds(0.001, layers)
    assert _seconds(0.001, layers, 32, one_program=True, updates=True) > 1.5 * whole


def test_a_slower_host_lengthens_short_steps_only():
    slower = Dispatch(*(2 * rate for rate in RECORDED))
    short, long = (_seconds(seconds, _layers(32), host=slower) / _seconds(seconds, _layers(32)) for seconds in (0, 10))
    assert short == pytest.approx(2, rel=0.05) and long == pytest.approx(1, rel=0.01)


def test_dispatch_is_split_into_calls_arrays_and_copies():
    ticks = itertools.count()
    assert measure_dispatch(jax.devices()[0], clock=lambda: next(ticks)) == Dispatch(call=1 / 8, array=0, copy=0)
    assert all(rate > 0 for rate in measure_dispatch(jax.devices()[0])[:2])


@pytest.mark.parametrize(("layers", "size"), [(2, 2), (28, 14), (36, 12), (32, 8), (61, 14), (19, 14)])
def test_only_short_layers_share_programs(layers, size):
    short, long = (SimpleNamespace(seconds=seconds) for seconds in (1e-3, 2e-3))
    costs = [SimpleNamespace(forward=short, backward=short)] * layers
    assert choose_group(costs, one_program=False) == size
    assert choose_group(costs, one_program=True) == (size if layers > 36 else layers)
    assert choose_group([SimpleNamespace(forward=short, backward=long)] * layers, one_program=True) == 1


def test_compiling_takes_longer_for_more_kinds_of_layers():
    def seconds(remat, moe=None, **options):
        config = SimpleNamespace(first_of_kind=(0, 0, 0, 0), moe=moe)
        return compile_seconds(config, parse_policies(remat, 4), **options)

    assert seconds("full") < seconds("2 x full + 2 x dots") < seconds("2 x full + 2 x dots", moe="experts")
    assert (
        seconds("full")
        < seconds("full", layers_per_program=4)
        < seconds("full", layers_per_program=4, one_program=True)
    )


def test_host_memory_is_pinned_beside_compilation():
    assert pinning_seconds(80 * GIB, 20) == pinning_seconds(12 * GIB, 20, devices=2) == 0
    assert pinning_seconds(80 * GIB, 4) == pinning_seconds(40 * GIB, 4, devices=2) == pytest.approx(6)


def test_of_plans_as_fast_the_one_that_starts_soonest_is_chosen():
    times = (1.0, 30.0), (1.005, 20.0), (1.009, 25.0), (1.1, 1.0)
    plan = Plan(policies=(), weights=(), seconds=0.0, device_bytes=0, host_bytes=0)
    plans = [replace(plan, seconds=seconds, compile_seconds=start) for seconds, start in times]
    assert first_to_start(plans) == first_to_start(plans, 2000) == [plans[1]] and first_to_start([]) == []
    assert first_to_start(plans, 100) == first_to_start(plans, 1) == [plans[3]]  # 1.1 + 100 · 0.1 s
