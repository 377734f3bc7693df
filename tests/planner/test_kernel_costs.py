"""Costs that kernels state at their launches, and the times that follow from them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import jax
import jax.numpy as jnp
import pytest

from jaxglue.engine.policy import PRESETS
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.backend import HOPPER, has_jax_triton
from jaxglue.ops.equations import equations
from jaxglue.ops.kernel_cost import KERNEL, KernelCost, KernelKind, stand_in, stated_cost
from jaxglue.planner.cost import program_cost
from jaxglue.planner.gpus import Gpu, find_gpu
from jaxglue.planner.planner import Planner
from jaxglue.planner.programs import Programs
from jaxglue.planner.workload import Workload

ROWS, GRADIENTS, MXFP4 = KernelKind.ROWS, KernelKind.ADAPTER_GRADIENTS, KernelKind.MXFP4
EXPERTS, FORWARD, BACKWARD = KernelKind.EXPERTS_MATMUL, KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD
H200 = find_gpu("H200")
SIZES = {"hidden_size": 2048, "num_hidden_layers": 1, "vocab_size": 4096, "head_dim": 128}

needs_kernels = pytest.mark.skipif(not has_jax_triton(), reason="kernels are traced")


def workload(config: dict, quantize: str = "none", width: int = 6144, **changes) -> Workload:
    config = {**config, **SIZES, "model_type": "qwen3", "intermediate_size": width, **changes}
    shape = replace(config_from_hf(config), quantize=quantize)
    return Workload(config=shape, batch_size=1, seq_len=4096, lora=LoraConfig())


def programs(work: Workload) -> list:
    """Trace a layer's passes, with everything recomputed, and the head."""
    traced = Programs(work, HOPPER)
    layer = traced.layer(0, PRESETS["full"])[0]
    return [layer.forward.program, layer.backward.program, traced.head]


def launches(work: Workload) -> Iterator:
    found = chain.from_iterable(equations(program.jaxpr) for program in programs(work))
    return (eqn for eqn, _ in found if stated_cost(eqn) is not None)


@pytest.fixture
def mixture(tiny_config) -> Workload:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
    return workload(tiny_config, model_type="qwen3_moe", **sizes)


@needs_kernels
@pytest.mark.parametrize("quantize", ["none", "nf4", "fp8"])
def test_every_launch_of_a_layer_states_its_kind(tiny_config, quantize):
    calls = list(launches(workload(tiny_config, quantize)))
    assert sum(eqn.primitive.name == KERNEL for eqn in calls) > 10
    kinds = Counter(stated_cost(eqn).kind for eqn in calls)
    assert kinds.keys() == {ROWS, GRADIENTS, FORWARD, BACKWARD}
    assert (kinds[FORWARD], kinds[BACKWARD]) == (2, 1)  # run, run again, gradients
    assert kinds[GRADIENTS] == 7  # of each adapter


@needs_kernels
def test_launches_of_a_small_layer_state_their_kinds(tiny_config):
    kinds = Counter(stated_cost(eqn).kind for eqn in launches(workload(tiny_config, width=2048)))
    assert kinds[GRADIENTS] == 1  # of all matrices


@needs_kernels
def test_experts_matmuls_state_the_rows_of_their_tiles(mixture):
    costs = [stated_cost(eqn) for eqn in launches(mixture)]
    flops = Counter(cost.flops for cost in costs if cost.kind == EXPERTS)
    given = {2 * 2 * 4096 * 2048 * width for width in (512, 1024)}
    assert all(1 < max(flops) / least <= 2.2 for least in given)
    assert not flops.keys() & given  # tiles are not full


@needs_kernels
def test_time_does_not_follow_from_a_functions_name(tiny_config, mixture, monkeypatch):
    works = [workload(tiny_config), workload(tiny_config, "fp8"), workload(tiny_config, width=2048), mixture]
    traced = [program for work in works for program in programs(work)]

    def seconds() -> list[float]:
        return [program_cost(program, H200, attention={}).seconds for program in traced]

    named = seconds()
    for program in traced:
        for eqn, _ in equations(program.jaxpr):
            if eqn.primitive.name == KERNEL:
                monkeypatch.setattr(eqn.params["fn"], "__name__", "misspelled")
                monkeypatch.setattr(eqn.params["fn"].fn, "__name__", "misspelled")
    assert seconds() == named


@needs_kernels
@pytest.mark.parametrize("kind", [ROWS, GRADIENTS, EXPERTS])
def test_plans_follow_stated_costs(tiny_config, mixture, monkeypatch, kind):
    work = mixture if kind == EXPERTS else workload(tiny_config)
    before = Planner(work, H200).plan(PRESETS["full"]).seconds
    estimate = KernelCost.estimate

    def slower(cost: KernelCost) -> dict:
        return estimate(replace(cost, flops=10 * cost.flops, bytes=10**10) if cost.kind == kind else cost)

    monkeypatch.setattr(KernelCost, "estimate", slower)
    assert Planner(replace(work, seq_len=work.seq_len + 128), H200).plan(PRESETS["full"]).seconds > 1.2 * before


def seconds(cost: KernelCost, dtype=jnp.bfloat16, gpu: Gpu = H200) -> float:
    arrays = [jax.ShapeDtypeStruct((4096, 8192), dtype)]
    program = jax.make_jaxpr(lambda x: stand_in(cost, [x], [x]))(*arrays)
    return program_cost(program, gpu, attention={}).seconds


def test_kernels_of_a_kind_have_its_rates():
    rows = KernelCost(kind=ROWS)
    assert seconds(rows) == pytest.approx(2 * 2 * 4096 * 8192 / H200.copy, rel=0.15)
    assert 1.2 < seconds(replace(rows, kind=GRADIENTS)) / seconds(rows) < 1.3
    assert 1.1 < seconds(replace(rows, kind=MXFP4)) / seconds(rows) < 1.2  # blocks are expanded no faster
    half = replace(H200, copy=H200.copy / 2)
    assert seconds(replace(rows, kind=MXFP4), gpu=half) < seconds(rows, gpu=half)  # where memory is slower
    assert seconds(rows, jnp.float8_e4m3fn) > 0.8 * seconds(rows)  # half the bytes
    assert seconds(replace(rows, bytes=10**9)) == pytest.approx(10 * seconds(replace(rows, bytes=10**8)), rel=0.02)


def test_kernels_take_their_flops_or_turns():
    rows = KernelCost(kind=ROWS, flops=10**12)
    assert seconds(rows) == pytest.approx(1e12 / H200.matmul, rel=1e-3)
    assert seconds(replace(rows, kind=EXPERTS)) / seconds(rows) == pytest.approx(1 / 0.9, rel=1e-2)
    assert seconds(replace(rows, fp8=True)) == pytest.approx(seconds(rows) / H200.fp8_gain, rel=1e-3)
    turns = [seconds(KernelCost(kind=ROWS, turns=count)) for count in (1000, 2000)]
    assert turns[1] == pytest.approx(2 * turns[0], rel=1e-2)


def test_a_launch_beside_the_launcher_has_no_cost_to_read():
    x = jnp.zeros(4)
    assert all(stated_cost(eqn) is None for eqn, _ in equations(jax.make_jaxpr(jnp.sin)(x).jaxpr))
