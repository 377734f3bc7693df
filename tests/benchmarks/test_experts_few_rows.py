"""Experts of few tokens are timed in all formats, with and without adapters, and their results are right."""

import json

import pytest
from selection import repeat


@pytest.mark.parametrize("formats", [["mxfp4"], repeat(["bf16", "mxfp4", "fp8", "nf4", "int8"])])
def test_rows_name_the_cost_of_adapters(formats, tmp_path, monkeypatch):
    import experts_few_rows

    file = tmp_path / "rows.json"
    monkeypatch.setattr(experts_few_rows, "read_rate", lambda: 1e12)
    flags = ["--layers", "tiny", "--tokens", "3", "--rank", "4", "--wide", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["experts_few_rows.py", *flags, "--formats", *formats])
    experts_few_rows.main()
    rows = json.loads(file.read_text())["results"]["rows"]
    shown = [row for row in rows if row["tiles"] == "in use"]
    assert [row["format"] for row in shown[::2]] == formats
    assert all(float(row["error"]) < 0.02 for row in rows)
    assert all(row["adapters"].endswith("%") and row["rank"] == 4 for row in shown[1::2])
