"""Runs with frozen weights in NF4."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxglue.hf.adapter import load_adapter
from jaxglue.lora import LoraConfig
from jaxglue.memory.workload import Workload, abstract_parts
from jaxglue.training.setup import prepare
from jaxglue.training.trainer import train
from jaxglue.training.weights import build_parameters


@pytest.fixture
def nf4_folder(model_folder):
    """Gives the model folder sizes that blocks divide."""
    path = model_folder / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return model_folder


def test_a_run_on_nf4_learns(make_config, nf4_folder, tmp_path):
    summary = train(make_config(steps=8, quantise="nf4", sample_prompt=("Hello",), sample_tokens=3))
    assert summary.last_loss < summary.first_loss - 0.2
    _, tensors = load_adapter(tmp_path / "run/adapter")
    assert len(tensors) == 2 * 7 * 2
    assert all(np.abs(tensor).max() > 0 for tensor in tensors.values())


def test_plan_and_planner_count_what_is_stored(make_config, nf4_folder):
    plain, stored = (prepare(make_config(quantise=quantise)) for quantise in ("none", "nf4"))
    assert plain.parameter_counts == stored.parameter_counts
    assert stored.plan()["dtype"] == "float32, linear layers of the decoder layers in NF4"
    linears = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    assert plain.weight_bytes - stored.weight_bytes == pytest.approx(linears * (4 - 0.516), rel=0.01)
    workload = Workload(config=stored.model, batch_size=1, seq_len=8, lora=LoraConfig(rank=4), visible_keys=4)
    planned = abstract_parts(replace(workload, dtype=stored.config.model.compute_dtype))[2]
    assert _specs(planned) == _specs(build_parameters(stored)[2])


def _specs(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_full_fine_tuning_is_refused(make_config, nf4_folder):
    with pytest.raises(ValueError, match=r"--quantise nf4 holds frozen weights.*use --method lora"):
        make_config(quantise="nf4", method="full")
    config = prepare(make_config(quantise="nf4")).model
    with pytest.raises(ValueError, match="quantise=nf4 holds frozen weights, and all train: use adapters"):
        Workload(config=config, batch_size=1, seq_len=8, lora=None, visible_keys=4)
