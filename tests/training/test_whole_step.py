"""Steps of small models as one program."""

import logging

import chex
import numpy as np
import pytest

from jaxglue.hf.adapter import load_adapter
from jaxglue.training.metrics import read_metrics
from jaxglue.training.trainer import train


def trained(make_config, folder, **options):
    """Loss, gradient norm and learning rate of all steps, and the adapter."""
    train(make_config(output=folder, epochs=2, batch_size=2, dropout=0.2, **options))
    names = "loss", "grad_norm", "learning_rate"
    lines = [[line[name] for name in names] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    return np.array(lines), load_adapter(folder / "adapter").tensors


@pytest.mark.parametrize(
    "options", [{}, {"on_spike": "skip"}, {"gradient_accumulation_steps": 2}, {"optimizer": "lion"}]
)
def test_one_program_trains_as_several_do(make_config, tmp_path, caplog, options):
    expected = trained(make_config, tmp_path / "several", **options)
    with caplog.at_level(logging.WARNING):
        got = trained(make_config, tmp_path / "one", **options, layers_per_program=2)
    assert len(got[0]) > 2 and not caplog.records  # of programs compiled again
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-7)
