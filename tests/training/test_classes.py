"""A classifier from rows with labels to its folders."""

import json

import numpy as np
import pytest

from jaxglue import export, score, train
from jaxglue.data.formats import read_numbers
from jaxglue.hf.adapter import load_adapter


def test_a_classifier_is_trained_scored_and_merged(with_weights, write_jsonl, tmp_path):
    """Rows of text with a label, which their ends tell."""
    rows = [{"text": f"day {i} was {'good' if i % 3 else 'bad'}", "label": int(i % 3 > 0)} for i in range(48)]
    data = write_jsonl(rows, "labels.jsonl")
    settings = {"objective": "classify", "data": (data,), "eval_fraction": 0.25, "epochs": 4, "learning_rate": 1e-2}
    summary = train(with_weights(**settings))
    assert summary.last_loss < 0.3 < 0.5 < summary.first_loss
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["eval_accuracy"] for line in lines if "eval_accuracy" in line][-1] > 0.9
    assert load_adapter(summary.adapter).tensors["score.weight"].shape == (2, 32)
    found = [scores for _, scores in score(adapter=summary.adapter, data=data)]
    assert np.mean(np.argmax(found, 1) == [row["label"] for row in rows]) > 0.9
    merged = export(adapter=summary.adapter, output=tmp_path / "merged")
    described = json.loads((merged / "config.json").read_text())
    assert described["architectures"] == ["Qwen3ForSequenceClassification"] and len(described["id2label"]) == 2
    again = [scores for _, scores in score(model=merged, data=data)]
    np.testing.assert_allclose(again, found, atol=1e-3)


def test_lists_of_labels_have_a_value_for_each_label(with_weights, write_jsonl):
    several = {f"labels.{place}": np.nan for place in range(3)}
    np.testing.assert_equal(read_numbers({"labels": "[1, 0, null]"}, several), [1, 0, np.nan])
    data = write_jsonl([{"text": "a", "labels": [1, 0]}, {"text": "b", "labels": [1, 0, 1]}])
    settings = {"objective": "classify", "problem_type": "multi_label_classification", "num_labels": 2}
    with pytest.raises(ValueError, match=r"jsonl:2: 'labels' has 3 values, expected 2, one for each of --num-labels"):
        train(with_weights(**settings, data=(data,)))
