"""The FLOPs by which a tower's time is predicted, beside those of its traced program."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.engine.policy import parse_policy
from jaxglue.models import abstract_model, config_from_hf, with_vision
from jaxglue.models.lora_config import LoraConfig
from jaxglue.planner.calibration import TOWER_IN_STEPS
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.planner import Planner
from jaxglue.planner.vision import TowerCost, tower_in_steps, tower_seconds
from jaxglue.planner.workload import TowerWork, Workload
from jaxglue.settings.recipe import SHIPPED
from jaxglue.vision.processor import read_processor
from jaxglue.vision.rows import Image, pack_patches

QWEN = {"model_type": "qwen3_5_vision", "patch_size": 16, "out_hidden_size": 4096, "depth": 2}


def products(jaxpr) -> float:
    """Return the FLOPs of all products in a program."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (axes, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2.0 * np.prod(eqn.outvars[0].aval.shape) * np.prod([shape[axis] for axis in axes])
        inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
        total += sum(products(each) for each in inner if hasattr(each, "eqns")) * eqn.params.get("length", 1)
    return total


def test_flops_of_a_tower_are_those_of_its_program():
    raw = json.loads((SHIPPED / "quickstart" / "seeing" / "config.json").read_text())
    raw |= {"vision_config": QWEN, "text_config": raw["text_config"] | {"hidden_size": 4096}}
    config, processor = with_vision(config_from_hf(raw), raw), read_processor(Path("/none"), raw)
    grid = processor.grid(1024, 1024)
    image = Image(key=b"", grid=grid, patches=np.zeros((grid.patches, 3 * processor.patch**2), np.uint8))
    graph, state = nnx.split(abstract_model(config, dtype=jnp.bfloat16).embed_tokens.vision)
    program = jax.make_jaxpr(lambda state, patches: nnx.merge(graph, state)(patches, jnp.bfloat16, backend="reference"))
    traced = products(program(state, pack_patches([[image]], processor, grid.patches)).jaxpr)
    assert sum(TowerCost(config, grid.patches).flops) == pytest.approx(traced, rel=0.01)


def test_a_tower_that_runs_in_each_step_takes_its_time():
    raw, gpu = json.loads((SHIPPED / "quickstart" / "seeing" / "config.json").read_text()), find_gpu("H200")
    raw["text_config"] |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tower, passes = TowerWork(0.01, 64.0), {}
    for trains, lora in (("none", LoraConfig()), ("projector", LoraConfig()), ("all", LoraConfig()), ("all", None)):
        config = with_vision(config_from_hf(raw), raw, trains=trains)
        work = Workload(config=config, batch_size=2, seq_len=512, lora=lora, tower=tower, gradient_accumulation_steps=3)
        image = TowerCost(config, 64).seconds(gpu)
        passes[trains, lora is None] = tower_seconds(work, gpu) / (0.01 * 2 * 512 * image)
    assert [*passes.values()] == pytest.approx([TOWER_IN_STEPS * count for count in (1, 2, 5, 6)])
    assert tower_seconds(replace(work, tower=None), gpu) == 0
    with_tower, without = (Planner(w, gpu).plan(parse_policy("full")) for w in (work, replace(work, tower=None)))
    assert with_tower.seconds - without.seconds == pytest.approx(3 * tower_seconds(work, gpu))


def test_a_tower_between_steps_takes_none_of_their_memory():
    raw, gpu = json.loads((SHIPPED / "quickstart" / "seeing" / "config.json").read_text()), find_gpu("H200")
    raw["text_config"] |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = with_vision(config_from_hf(raw), raw)
    work = Workload(config=config, batch_size=2, seq_len=512, lora=LoraConfig())
    on_device, apart = (Planner(replace(work, host_tower=apart), gpu).predictor for apart in (False, True))
    tower = apart.resident.host_tower
    assert tower == on_device.resident.frozen_ends - apart.resident.frozen_ends > 0
    needs = [each.memory(parse_policy("full")) for each in (on_device, apart)]
    assert needs[0].host_bytes + tower == needs[1].host_bytes
    assert needs[1].device_bytes >= apart.resident.total() + tower


@pytest.mark.parametrize("seq_len", [512, 8192])
def test_a_tower_in_steps_takes_its_memory_where_the_text_takes_none(seq_len):
    raw, gpu = json.loads((SHIPPED / "quickstart" / "seeing" / "config.json").read_text()), find_gpu("H200")
    raw["text_config"] |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = with_vision(config_from_hf(raw), raw, trains="all")
    work = Workload(config=config, batch_size=2, seq_len=seq_len, lora=LoraConfig(), tower=TowerWork(0.01, 64.0))
    predictor = Planner(work, gpu).predictor
    text = Planner(replace(work, config=with_vision(config_from_hf(raw), raw), tower=None), gpu).predictor
    need, of_text = (each.memory(parse_policy("full")).device_bytes for each in (predictor, text))
    at_work = predictor.resident.total() + tower_in_steps(work)
    assert at_work <= need < at_work + of_text - text.resident.total()
