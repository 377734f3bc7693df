"""Result files tell where, when and how they were measured."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIELDS = {"gpu", "date", "commit", "versions", "command", "host_memory_gib"}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_file_tells_its_provenance(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    records = content.items() if path.stem == "gpu_check" else [(content.get("gpu"), content)]
    for gpu, record in records:
        assert gpu and record["date"] >= "2026-11" and record["commit"]
        assert {"gpu": gpu, **record}.keys() >= FIELDS
