"""The check on a GPU: which tests it runs, and what it records."""

import json

import numpy as np
import pytest
from selection import thorough


def test_all_files_with_gpu_tests_are_found():
    from gpu_check import gpu_test_files

    assert "tests/ops/gated_mlp/test_swiglu.py" in gpu_test_files()
    assert "tests/data/test_readers.py" not in gpu_test_files()


def test_record_adds_values_and_keeps_others(tmp_path):
    from gpu_check import Check, record

    recorded = {"A": {"losses": {"llama": 1}, "speed": {"dots": 2}}, "B": {"speed": {}}}
    fresh = {"losses": {}, "speed": {"streamed": 3}}
    record(tmp_path / "a.json", Check(None, "A", recorded, None, 1, 0, 0, fresh=fresh))
    expected = recorded | {"A": {"losses": {"llama": 1}, "speed": {"dots": 2, "streamed": 3}}}
    assert json.loads((tmp_path / "a.json").read_text()) == expected


@thorough("benchmarks/test_gpu_check.py")
def test_drift_is_that_of_losses_of_the_same_batches():
    from drift import drift, measure
    from gpu_check import drift_rows

    result = measure("tiny", steps=3, tokens=128, rate=1e-2)
    losses = result["losses"]
    assert losses["float32"][0] == pytest.approx(np.log(2048), rel=0.05)
    assert all(0 < found < 1e-3 for found in result["drift"].values())
    assert result["drift"]["kernels"] == drift(losses["kernels"], losses["float32"])
    assert [row.ok for row in drift_rows(result)] == [True, True]
    for last in (1.02 * losses["kernels"][-1], np.nan):
        result["drift"]["kernels"] = drift([*losses["kernels"][:-1], last], losses["float32"])
        assert [row.ok for row in drift_rows(result)] == [True, False]


def test_tokens_of_sources_fill_rows_of_any_vocabulary():
    from drift import source_batches

    for vocabulary in (2048, 151_936):
        first, second = source_batches(2, 128, vocabulary)
        assert first.tokens.shape == (1, 128) and first.tokens.min() >= 0 and first.tokens.max() < vocabulary
        assert (first.tokens != second.tokens).any()
