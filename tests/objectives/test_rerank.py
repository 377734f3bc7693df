"""Rerankers against plain PyTorch: losses and gradients of documents behind one copy of their query."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from read_units import read_batches, require_gradients

from jaxglue.data.questions import Labels
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.config import ObjectiveConfig

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((GOLDENS / "reads.json").read_text())
NAMED = {kind: tuple(tuple(group) for group in groups) for kind, groups in GOLDEN["labels"].items()}
LABELS = Labels({kind: ("",) * len(groups) for kind, groups in NAMED.items()}, NAMED)


@pytest.mark.parametrize("name", GOLDEN["rerank"]["cases"])
def test_losses_and_gradients_equal_plain_pytorch(name):
    case = GOLDEN["rerank"]["cases"][name]
    model = load_model(GOLDENS / "qwen3_tied", dtype=jnp.float32)
    graphdefs, trainable, frozen = split_model(model, nnx.Param)
    units = [
        (unit["query"], [(each["tokens"], 0, [each["label"]]) for each in unit["documents"]])
        for unit in GOLDEN["rerank"]["units"]
    ]
    settings = ObjectiveConfig(objective="rerank", **case["settings"])
    batches = read_batches(units, settings.task(shared_prompt=True), LABELS)
    executor = Executor(graphdefs, model.config, policy=PRESETS["full"], dtype=jnp.float32, objective=settings.make())
    sums, gradients = executor.loss_and_gradients(trainable, frozen, list(batches), float(batches.targets))
    assert float(sums[0]) == pytest.approx(case["loss"], rel=1e-5)
    require_gradients(flatten_names(gradients), case["gradients"])
