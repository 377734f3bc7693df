"""The FLOPs by which a tower's time is predicted, beside those of its traced program."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.models import abstract_model, config_from_hf, with_vision
from jaxglue.planner.vision import TowerCost
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
