"""Experts of few tokens are timed in all formats, with and without adapters, and their results are right."""

import json

import pytest
from selection import repeat


@pytest.mark.parametrize("formats", [["int8"], repeat(["none", "mxfp4", "fp8", "nf4", "int8"])])
def test_rows_name_the_cost_of_adapters(formats, tmp_path, monkeypatch):
    import experts_few_rows

    file = tmp_path / "rows.json"
    monkeypatch.setattr(experts_few_rows, "read_rate", lambda: 1e12)
    flags = ["--layers", "tiny", "--tokens", "3", "--rank", "4", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["experts_few_rows.py", *flags, "--formats", *formats])
    experts_few_rows.main()
    rows = json.loads(file.read_text())["results"]["rows"]
    assert [row["format"] for row in rows[::2]] == [form.replace("none", "bf16") for form in formats]
    assert all(float(row["error"]) < 0.02 for row in rows)
    assert all(row["adapters"].endswith("%") and row["rank"] == 4 for row in rows[1::2])
