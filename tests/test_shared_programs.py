"""Runs of tests share programs until a test replaces a part of them."""

import jax.numpy as jnp
import pytest
from flax import nnx
from shared_programs import CALLERS, PARTS, NotingPatch, is_of, share

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.models.parameters import split_model
from jaxglue.ops import row_split
from tests.test_architecture import imported_modules, reachable


def test_equal_models_share_programs_until_a_part_is_replaced(tiny_model, monkeypatch):
    def executor(family="qwen3"):
        graphdefs, *_ = split_model(model := tiny_model(family, num_hidden_layers=1), nnx.Param)
        return Executor(graphdefs, model.config, policy=PRESETS["full"], dtype=jnp.float32)

    with pytest.MonkeyPatch.context() as patch:
        share(patch)
        first, second, other = executor(), executor(), executor("llama")
        assert first.layers[0] is second.layers[0] is not other.layers[0]
        second.multiply_in_fp8([False], head=False)
        assert first.fp8_layers == [True]
        with monkeypatch.context() as part:
            part.setattr("jaxglue.training.loop.train_step", None)
            assert executor().layers[0] is first.layers[0]
            part.setattr(row_split, "_LEAST_CHUNK", 2)
        assert NotingPatch.changes_programs and executor().layers[0] is not first.layers[0]


def test_shared_programs_hold_no_part_of_their_callers():
    shared = "jaxglue.engine.executor", "jaxglue.generation.engine", "jaxglue.training.adamw"
    parts = {*shared}.union(*(reachable(name, imported_modules()) for name in shared))
    assert {name for name in parts if is_of(name, CALLERS)} == set(PARTS)
