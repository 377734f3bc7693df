"""docs/memory.md shows the predictions in `benchmarks/results/what_fits.json`."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_memory_page_has_the_predicted_table():
    from what_fits import format_table

    results = json.loads((ROOT / "benchmarks/results/what_fits.json").read_text())["results"]
    assert format_table(results) in (ROOT / "docs/memory.md").read_text(encoding="utf-8")
