"""Reasons for a choice: what binds it, the runner-up, and what would change it."""

from dataclasses import replace

import pytest

from jaxglue.engine.policy import parse_policy
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.planner.explain import explain
from jaxglue.planner.gpus import GIB, find_gpu
from jaxglue.planner.plan import MARGIN
from jaxglue.planner.planner import Planner
from jaxglue.planner.workload import Workload

HOST = 8 * GIB


@pytest.fixture(scope="module")
def planner(tiny_config):
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "vocab_size": 32000}
    config = config_from_hf({**tiny_config, **sizes, "model_type": "qwen3", "head_dim": 128})
    return Planner(Workload(config=config, batch_size=1, seq_len=2048, lora=LoraConfig()), find_gpu("RTX 4090"))


def test_a_choice_without_limits_is_bound_by_time(planner):
    chosen = planner.resolve("auto", weights="auto", host_memory=HOST)
    found = explain(planner, chosen, host_memory=HOST)
    assert (found.limit, found.barred) == ("time", None)
    assert found.runner_up.seconds >= chosen.seconds
    assert "; bound by time alone; runner-up: " in str(found.reason)
    assert "more memory would not help" in str(found.reason)


def test_the_missing_memory_would_change_the_choice(planner):
    full, none = (planner.plan(parse_policy(name)).device_bytes for name in ("full", "none"))
    short = Planner(planner.workload, planner.gpu.limited((full + none) / 2 / (1 - MARGIN) / GIB))
    chosen = short.resolve("auto", weights="auto", host_memory=HOST)
    found = explain(short, chosen, host_memory=HOST)
    assert found.limit == "gpu"
    assert found.barred.seconds < min(chosen.seconds, found.runner_up.seconds)
    assert not short.fits(found.barred, HOST) and short.fits(found.runner_up, HOST)
    assert f"GiB on the GPU more, for {found.barred} at " in str(found.reason)
    larger = replace(short.gpu, memory=short.gpu.memory + (found.missing.device_bytes + 1) / (1 - MARGIN))
    assert Planner(planner.workload, larger).fits(found.barred, HOST)
