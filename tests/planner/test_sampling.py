"""Predicted times of sampling are near recorded ones, and count experts, the cache and answers at a time."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.generation.pages import state_bytes, token_bytes
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.planner.calibration import EXACT, EXACT_LAYER
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.sampling import DecodeCost, _live
from jaxglue.planner.workload import Workload

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = find_gpu("H200")


def cost_of(raw, quantize):
    config = config_from_hf(raw).quantized(quantize)
    workload = Workload(config=config, batch_size=1, seq_len=16384, lora=LoraConfig(rank=16, alpha=32))
    return DecodeCost.of(workload, token_bytes(config, jnp.bfloat16), state_bytes(config, jnp.bfloat16))


@pytest.mark.parametrize(
    ("file", "gpu", "shape", "quantize", "within"),
    [
        ("rl_step_h200", "H200", "qwen3-8b", "none", 0.15),
        ("rl_fp8_h200", "H200", "qwen3-8b", "fp8", 0.15),
        ("rl_fp8", "H100", "qwen3-8b", "fp8", 0.15),
        ("rl_oss_rings_h200", "H200", "gpt-oss-20b", "none", 0.1),
        ("rl_a3b_fp8_h200", "H200", "qwen3-30b-a3b", "fp8", 0.1),
    ],
)
def test_predictions_are_near_recorded_steps(file, gpu, shape, quantize, within, monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parent)
    from rl_step import PROMPT, forced_lengths
    from shapes import SHAPES

    (run,) = json.loads((RESULTS / f"{file}.json").read_text())["results"]
    cost = cost_of(SHAPES[shape], quantize)
    seconds = cost.seconds(find_gpu(gpu), forced_lengths(512, 1024), PROMPT, 8, 512)
    assert seconds == pytest.approx(run["ended"]["all"], rel=within)  # programs compiled beside the first step follow


def test_the_price_of_exact_sampling_is_that_of_the_file(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parent)
    from shapes import SHAPES

    rows = json.loads((RESULTS / "exact_prices_h200.json").read_text())["results"]["prices"]
    layers = SHAPES["qwen3-8b"]["num_hidden_layers"]
    added = {row["streams"]: 1e-3 * (row["exact, ms a step"] - row["near, ms a step"]) for row in rows}
    found = [(streams, float(f"{seconds / layers:.3g}")) for streams, seconds in added.items()]
    assert EXACT["H200"] == pytest.approx(dict(found), rel=1e-2), f"the file's pairs for EXACT: {found}"
    cost = cost_of(SHAPES["qwen3-8b"], "none")
    assert cost.weights / cost.layers == pytest.approx(EXACT_LAYER, rel=1e-2)
    few, most = min(added), max(added)
    lengths = np.full(few, 10)
    assert cost.exact_seconds(H200, lengths, few) == pytest.approx(10 * added[few], rel=1e-2)
    assert cost.exact_seconds(H200, lengths, 1) == pytest.approx(10 * few * added[few], rel=1e-2)
    assert cost.exact_seconds(H200, np.full(most, 10), most) == pytest.approx(10 * added[most], rel=1e-2)
    assert cost.exact_seconds(H200, np.full(most + 1, 10), most + 1) is None
    assert cost.exact_seconds(find_gpu("H100"), lengths, few) is None
    small = replace(cost, weights=cost.weights / 2, layers=cost.layers // 2)
    assert small.exact_seconds(H200, lengths, few) == pytest.approx(5 * added[few], rel=1e-2)


def test_few_tokens_read_the_experts_that_they_choose(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parent)
    from shapes import SHAPES

    cost = cost_of(SHAPES["qwen3-30b-a3b"], "nf4")
    values = 48 * 128 * 3 * 2048 * 768
    assert cost.experts == pytest.approx(values * 0.516 + 4 * 48 * 128 * 16 * (2048 + 1536 + 768 + 2048), rel=0.01)
    one, many = cost.steps(H200, np.array([1.0, 512.0]))
    read = replace(cost, experts=0.0).steps(H200, np.array([1.0, 512.0]))
    assert (one - read[0]) / (many - read[1]) == pytest.approx(8 / 128, rel=0.01)


def test_steps_read_and_write_the_states_of_answers(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parent)
    from shapes import SHAPES

    lengths, cost = np.array([30, 10]), cost_of(SHAPES["qwen3.5-35b-a3b"], "fp8")
    states = 30 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert cost.state_bytes == states
    seconds = [replace(cost, state_bytes=each).seconds(H200, lengths, 20, 1, 2) for each in (0.0, states)]
    assert seconds[1] - seconds[0] == pytest.approx(40 * 2 * states / (0.75 * H200.copy))


def test_answers_wait_for_slots():
    assert _live([3, 1, 2], 2).tolist() == [2, 2, 2]
    assert _live([3, 1, 2], 3).tolist() == [3, 2, 1]
    assert _live([2, 2], 1).tolist() == [1, 1, 1, 1]
