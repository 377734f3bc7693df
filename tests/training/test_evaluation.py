"""Metrics of held-out data: perplexity, token accuracy, losses by source."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.data.config import short_names
from jaxglue.data.dataset import token_values
from jaxglue.training.evaluation import evaluation_lines, held_out_metrics, named_metrics
from jaxglue.training.record import read_metrics
from jaxglue.training.setup import resolve
from jaxglue.training.step import prepare_steps
from jaxglue.training.train import train


def test_tokens_know_their_source():
    ids = np.array([[1, 1, 2, 0], [1, 2, 2, 3], [0, 0, 0, 0]])
    owners = [np.array([2, 0]), np.array([0, 1, 0]), np.array([], int)]
    assert token_values(ids, owners).tolist() == [[2, 2, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_names_of_sources_are_short_and_unique():
    names = ["a/x.jsonl", "b/x.jsonl", "hf:o/n", "c/y.jsonl", "d/"]
    assert short_names(names) == ("x.jsonl#1", "x.jsonl#2", "hf:o/n", "y.jsonl", "d")


def test_metrics_are_weighted_means():
    sums = np.array([[6.0, 2.0, 0.0], [1.0, 1.0, 0.0], [3.0, 4.0, 0.0]])
    values = held_out_metrics(8 / 7, sums, ("a", "b", "c"))
    assert values == {
        "eval_perplexity": math.exp(8 / 7),
        "eval_token_accuracy": pytest.approx(2 / 7),
        "eval_loss/a": 2.0,
        "eval_loss/b": 0.5,
    }
    lines = list(evaluation_lines({"eval_loss": 8 / 7} | values))
    assert lines == ["eval loss 1.1429, perplexity 3.136, token accuracy 28.6%", "  a: 2.0000", "  b: 0.5000"]
    assert held_out_metrics(1e4, sums, ("a",))["eval_perplexity"] == math.inf


def test_sums_by_source_equal_single_tokens(make_config, write_jsonl, chat_rows):
    other = write_jsonl([{"text": "other words " * n} for n in range(2, 9)], name="other.jsonl")
    config = make_config(eval_fraction=0.5, batch_size=2)
    config = make_config(eval_fraction=0.5, batch_size=2, data=(*config.data.data, other))
    setup = resolve(config)
    parts, state = prepare_steps(setup, None)
    trees, executor = (state.trainable, state.frozen), parts.executor
    totals, expected = 0.0, np.zeros((3, 2))
    for batch in jax.device_put(list(setup.eval_batches)):
        sums = executor.evaluate(*trees, batch, 2)
        assert float(sums[0].sum()) == pytest.approx(float(executor.loss(*trees, batch)))
        losses, best = jax.device_get(executor.token_scores(*trees, batch))
        weights, owners = np.asarray(batch.loss_weights), np.asarray(batch.sources)
        for source in (0, 1):
            own = weights * (owners == source)
            expected[:, source] += [(own * losses).sum(), (own * (best == batch.targets)).sum(), own.sum()]
        totals = totals + np.asarray(sums, np.float64)
    np.testing.assert_allclose(totals, expected, rtol=1e-5)
    assert totals[2].sum() == setup.eval_batches.targets and (totals[2] > 0).all()


def test_runs_log_metrics_of_each_source(make_config, write_jsonl, tmp_path):
    other = write_jsonl([{"text": "other words " * n} for n in range(2, 9)], name="other.jsonl")
    config = make_config(steps=2)
    train(make_config(steps=2, eval_every=1, eval_data=(*config.data.data, other)))
    values = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line]
    assert len(values) == 2
    assert 0 <= values[0]["eval_token_accuracy"] <= 1
    assert values[0]["eval_perplexity"] == pytest.approx(math.exp(values[0]["eval_loss"]))
    by_source = [value for name, value in values[0].items() if name.startswith("eval_loss/")]
    assert len(by_source) == 2 and min(by_source) <= values[0]["eval_loss"] <= max(by_source)


def test_lines_show_metrics_of_an_objective():
    values = {
        "eval_loss": 0.5,
        "eval_rewards/accuracies": 0.75,
        "eval_rewards/margins": 0.25,
        "eval_logps/chosen": -9.0,
    }
    assert list(evaluation_lines(values)) == ["eval loss 0.5000, accuracy 0.75, margin 0.25"]


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array(1.0), jnp.ones(())])
def test_metrics_of_callers_are_numbers(value):
    assert named_metrics({"eval_a": value}, {}) == {"eval_a": 1.0}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "compute_metrics returned None: expected a dictionary"),
        ({"a": np.ones(2)}, "compute_metrics returned 'a': array.*: expected a number by name"),
        ({"a": "high"}, "'a': 'high': expected a number"),
        ({"a": {"b": 1}}, "'a': {'b': 1}: expected a number"),
        ({"a": None}, "'a': None: expected a number"),
        ({1: 2.0}, "1: 2.0: expected a number by name"),
        ({"loss": 2.0}, "the name 'loss' is taken: eval_loss is recorded already"),
        ({"a": 1, "eval_a": 2}, "the name 'eval_a' is taken"),
    ],
)
def test_other_results_of_callers_are_refused_by_name(found, message):
    with pytest.raises(ValueError, match=message):
        named_metrics(found, {"eval_loss": 1.0})
