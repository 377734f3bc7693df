"""Steps of small models as one program."""

import dataclasses
import logging

import chex
import numpy as np
import pytest
from selection import repeat

from jaxglue.hf.adapter import load_adapter
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.train import train

ANSWERS = {
    "dpo": {"prompt": "What is 1? ", "chosen": "It is 1.", "rejected": "Good"},
    "kto": {"prompt": "What is 1? ", "completion": "It is 1.", "label": True},
}


@pytest.fixture
def trained(make_config, write_jsonl, tmp_path):
    """Return a function: → loss, gradient norm and learning rate of all steps of a run, and its adapter."""

    def run(name, objective="sft", **options):
        data = {"data": (write_jsonl([ANSWERS[objective]] * 6, "pairs.jsonl"),)} if objective != "sft" else {}
        config = make_config(output=tmp_path / name, steps=6, batch_size=2, dropout=0.2, **data, **options)
        train(dataclasses.replace(config, objective=ObjectiveConfig(objective=objective)))
        names = "loss", "grad_norm", "learning_rate"
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        values = [[line[name] for name in names] for line in lines if "loss" in line]
        return np.array(values), load_adapter(tmp_path / name / "adapter").tensors

    return run


@pytest.mark.parametrize(
    "options",
    [
        repeat({}),
        repeat({"objective": "dpo"}),
        repeat({"objective": "kto"}),
        repeat({"on_spike": "skip"}),
        {"gradient_accumulation_steps": 2},
        repeat({"optimizer": "lion"}),
    ],
)
def test_one_program_trains_as_several_do(trained, caplog, options):
    expected = trained("several", **options)
    with caplog.at_level(logging.WARNING):
        got = trained("one", **options, layers_per_program=2)
    assert len(got[0]) == 6 and not caplog.records  # of programs compiled again
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-7)
