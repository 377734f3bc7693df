"""Exact sampling is refused at the start where it cannot be kept, and `auto` takes it where it costs little."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxglue.engine.residency import DEVICE
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.ops.backend import tracing_for
from jaxglue.planner import calibration
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.memory import resident_bytes
from jaxglue.planner.workload import Workload
from jaxglue.training.report import plan_rows
from jaxglue.training.sampling import PredictedAnswers, weigh_exact
from jaxglue.training.setup import resolve

QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
QWEN3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3_8B |= {"max_position_embeddings": 40960}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}


@pytest.fixture
def make_exact(make_config, write_jsonl):
    """Build a run of GRPO in bfloat16 with exact sampling."""

    def make(**changes):
        given = {
            "data": (write_jsonl([{"question": "What is 1 plus 2?"}] * 2, "prompts.jsonl"),),
            **{"seq_len": 128, "objective": "grpo", "reward": ("length?soft=2&hard=8",), "num_generations": 4},
            **{"generation_batch_size": 8, "max_completion_length": 12, "steps": 1, "dtype": "bfloat16"},
        }
        return make_config(**given | {"exact_sampling": "on"} | changes)

    return make


HYBRID = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}


@pytest.mark.parametrize(
    ("settings", "shape", "reason"),
    [
        ({"dtype": "float32"}, {}, "activations are in float32"),
        ({"quantize": "nf4"}, {}, "weights of 16 or 32 bits"),
        ({"matmul": "fp8"}, {}, "fp8"),
        ({"temperature": 0.7}, {}, "kernels of the loss are for 1"),
        ({"dropout": 0.1}, {}, "sampling drops no inputs"),
        ({"drafts": "2"}, {}, "drafts are verified several at a time"),
        ({"staleness": 1}, {}, "answers are of older weights"),
        ({"targets": ("all-linear", "lm_head")}, {"tie_word_embeddings": False}, "projection has an adapter"),
        ({}, HYBRID, "layers of"),
    ],
)
def test_what_exact_sampling_cannot_hold_is_refused_before_weights_load(
    make_exact, model_folder, monkeypatch, settings, shape, reason
):
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | shape))
    monkeypatch.setattr("jax.device_count", lambda: 1)
    with pytest.raises(ValueError, match=f"exact-sampling.*{reason}"):
        resolve(make_exact(**settings))


def test_auto_is_off_where_no_price_was_measured_and_the_plan_says_so(make_exact, monkeypatch):
    monkeypatch.setattr("jax.device_count", lambda: 1)
    run = resolve(make_exact(exact_sampling="auto"))
    assert run.rollouts.plan.tile is None and not run.workload.exact
    assert run.recorded.rollouts.exact_sampling == "auto"
    said = "exact sampling off, its price on cpu is not measured; --exact-sampling on takes it"
    assert plan_rows(run)["sampling"] == said


@pytest.fixture
def predict(make_exact):
    """predict(gpu, shape, gib, **settings) → the answers of a step."""

    def make(gpu="H200", shape=QWEN3_8B, gib=None, **settings):
        sizes = {"generation_batch_size": 512, "num_generations": 8, "max_completion_length": 1024, "seq_len": 16384}
        config = make_exact(exact_sampling="auto", **sizes | settings)
        workload = Workload(
            config=config_from_hf(shape),
            batch_size=1,
            seq_len=16384,
            lora=LoraConfig(rank=16, alpha=32),
            dtype=jnp.dtype(jnp.bfloat16),
            objective=ObjectiveConfig(objective="grpo").make(),
        )
        weights = (DEVICE,) * workload.config.num_hidden_layers
        return config, PredictedAnswers.of(config, workload, find_gpu(gpu).limited(gib), weights)

    return make


@pytest.fixture
def weigh(predict):
    """weigh(gpu, shape, **settings) → whether auto is on, and why."""

    def make(*given, **settings):
        config, answers = predict(*given, **settings)
        with tracing_for(answers.gpu.capability):
            return weigh_exact(config, answers)

    return make


def measured(microseconds, *streams):
    streams = streams or (64, 512)
    return {"H200": {count: calibration.Fitted(1e-6 * microseconds, "s", "H200", "a test") for count in streams}}


def test_auto_takes_what_costs_little_by_what_was_measured(weigh, monkeypatch):
    monkeypatch.setattr(calibration, "EXACT", measured(10))
    on, reason = weigh()
    assert on and reason.startswith("on, +3% of a step, predicted: 0.37 s to ~17 s of sampling and 0.")
    monkeypatch.setattr(calibration, "EXACT", measured(100))
    on, reason = weigh()
    assert not on and "3.7 s to ~17 s" in reason and reason.endswith("above 5%; --exact-sampling on takes it")
    on, reason = weigh(num_iterations=2)  # which would need old log-probabilities
    assert "less" in reason and "old log-probabilities" in reason


def test_auto_is_off_where_its_measured_price_is_high(weigh, monkeypatch):
    monkeypatch.setattr(calibration, "EXACT", measured(59.2, 64))
    on, reason = weigh(generation_batch_size=64)
    assert not on and reason.startswith("off, +29% of a step, predicted: 2.2 s to ~6 s of sampling")


def test_auto_is_off_for_gpus_and_models_that_were_not_measured(weigh, monkeypatch):
    monkeypatch.setattr(calibration, "EXACT", measured(10, 64))
    what = "its price for 512 answers at a time of such a model on H200 is not measured"
    assert weigh() == (False, f"off, {what}; --exact-sampling on takes it")
    monkeypatch.setattr(calibration, "EXACT", measured(0))
    assert weigh()[0]
    assert "on H100 is not measured" in weigh("H100")[1]
    assert "on H200 is not measured" in weigh(shape=QWEN3_8B | MIXTURE)[1]


def test_auto_is_off_where_it_would_be_refused(weigh, monkeypatch):
    monkeypatch.setattr(calibration, "EXACT", measured(0))
    assert weigh(temperature=0.7)[1].startswith("off, it cannot be kept: --temperature")
    assert weigh("A100", shape=QWEN3_8B)[1].startswith("off, it cannot be kept: ")


@pytest.mark.parametrize(
    ("gpu", "gib", "settings", "moves"),
    [
        ("H200", 70, {}, True),
        ("H200", 70, {"staleness": 1}, False),  # training needs them meanwhile
        ("H200", 120, {}, False),  # all answers find a slot
        ("GB10", 70, {}, False),  # the host's memory is the GPU's
        ("H200", 70, {"generation_batch_size": 8}, False),
    ],
)
def test_moments_leave_their_memory_to_answers_where_that_takes_less_time(predict, gpu, gib, settings, moves):
    _, answers = predict(gpu, QWEN3_8B | MIXTURE | {"num_experts": 64}, gib=gib, **settings)
    resident = resident_bytes(answers.workload)
    beside = answers.gpu.memory - resident.total()
    assert answers.free == beside + moves * resident.moments
    slow = replace(answers.gpu, link=1e6)
    assert not replace(answers, gpu=slow).pays_moving(resident.moments, 100, 100, 200)
    assert answers.pays_moving(1e6, 100, 1, 2) and not answers.pays_moving(0, 0, 2, 2)
