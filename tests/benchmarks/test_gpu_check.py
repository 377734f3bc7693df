"""The check on a GPU: which tests it runs, and what it records."""

import json


def test_all_files_with_gpu_tests_are_found():
    from gpu_check import gpu_test_files

    assert "tests/ops/fp8/test_swiglu.py" in gpu_test_files()
    assert "tests/data/test_readers.py" not in gpu_test_files()


def test_record_adds_values_and_keeps_others(tmp_path):
    from gpu_check import Check, record

    recorded = {"A": {"losses": {"llama": 1}, "speed": {"dots": 2}}, "B": {"speed": {}}}
    fresh = {"losses": {}, "speed": {"streamed": 3}}
    record(tmp_path / "a.json", Check(None, "A", recorded, None, 1, 0, 0, fresh=fresh))
    expected = recorded | {"A": {"losses": {"llama": 1}, "speed": {"dots": 2, "streamed": 3}}}
    assert json.loads((tmp_path / "a.json").read_text()) == expected
