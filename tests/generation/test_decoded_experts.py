"""How experts are multiplied in decode steps is told once, with the reason where their kernels do not serve."""

import logging

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxglue.generation.decoded_experts import choose_decoded_experts
from jaxglue.generation.engine import Engine
from jaxglue.generation.pages import plan_cache
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops import backend
from jaxglue.ops.backend import HOPPER, tracing_for

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "quantization_config": None}


@pytest.fixture
def parts(tiny_model):
    """Return (graphdefs, trainable, frozen, config) of a tiny mixture with adapters of a rank: parts(rank)."""

    def make(rank: int, model_type: str = "qwen3_moe"):
        model = tiny_model(model_type, dtype=jnp.bfloat16, **(MIXTURE if "moe" in model_type else {}))
        add_lora(model, LoraConfig(rank=rank), rngs=nnx.Rngs(0))
        return *split_model(model, nnx.LoRAParam), model.config

    return make


def test_reasons_are_those_of_the_kernels(parts, monkeypatch):
    pytest.importorskip("triton")

    def choose(rank: int, slots: int, **options):
        with tracing_for(HOPPER):
            return choose_decoded_experts(*parts(rank, **options), jnp.bfloat16, slots)

    monkeypatch.setattr(backend, "UNTRIED", set())
    assert choose(8, 16).name == "triton"
    assert choose(65, 16).reason.endswith("rank must be at most 64, got 65")
    assert choose(8, 65).reason.endswith("experts have more than 32 rows each")
    assert choose(8, 16, model_type="qwen3") is None
    monkeypatch.setattr(backend, "UNTRIED", {"adapters of experts with few rows"})
    assert "no GPU has run" in choose(8, 16).reason


def test_an_obstacle_is_told_once(parts, monkeypatch, caplog):
    pytest.importorskip("triton")
    graphdefs, *trees, config = parts(65)
    engine, plan = Engine(graphdefs, config, dtype=jnp.bfloat16), plan_cache([(4, 8)], config, jnp.bfloat16, free=1e9)
    with tracing_for(HOPPER), caplog.at_level(logging.INFO):
        for _ in range(2):
            engine._tell_of_experts(trees, plan)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["not by kernels of few rows"]
    assert "rank must be at most 64" in caplog.text
