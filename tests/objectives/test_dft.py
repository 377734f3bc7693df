"""Dynamic fine-tuning: TRL's loss and gradients (golden of `make_dft.py`), and a run of it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from read_units import require_gradients

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.ops.segments import pack_segments

GOLDENS = Path(__file__).parent.parent / "goldens"
GOLDEN = json.loads((GOLDENS / "dft.json").read_text())
PAIRS = json.loads((GOLDENS / "preferences.json").read_text())["pairs"]


def test_loss_and_gradients_equal_trl():
    rows = [(pair["prompt_ids"], pair[name]) for pair in PAIRS for name in ("chosen_ids", "rejected_ids")]
    whole = [prompt + answer for prompt, answer in rows]
    parts = [
        np.concatenate(pieces)[None]
        for pieces in (
            whole,
            [[*tokens[1:], 0] for tokens in whole],
            [[0] * (len(prompt) - 1) + [1] * len(answer) + [0] for prompt, answer in rows],
        )
    ]
    lengths = [len(tokens) for tokens in whole]
    batch = Batch(
        tokens=parts[0].astype(np.int32),
        targets=parts[1].astype(np.int32),
        loss_weights=parts[2].astype(np.float32),
        segments=pack_segments([lengths], seq_len=sum(lengths)),
    )
    model = load_model(GOLDENS / "qwen3_tied", dtype=jnp.float32)
    graphdefs, trainable, frozen = split_model(model, nnx.Param)
    objective = ObjectiveConfig(objective="dft").make()
    executor = Executor(graphdefs, model.config, policy=PRESETS["full"], dtype=jnp.float32, objective=objective)
    targets = float(parts[2].sum())
    sums, gradients = executor.loss_and_gradients(trainable, frozen, [batch], targets)
    assert float(objective.loss(sums)) == pytest.approx(GOLDEN["loss"], rel=1e-5)
    assert float(objective.metrics(sums)["cross_entropy"]) == pytest.approx(GOLDEN["cross_entropy"], rel=1e-5)
    require_gradients(flatten_names(gradients), GOLDEN["gradients"])
