"""Every part of the comparison of exact sampling with training ends, and finds equal bits."""

import json

import pytest
from selection import thorough

TINY = ("--shape", "tiny", "--dtype", "bfloat16", "--prompts", "2", "--answers", "2", "--longest", "8", "--row", "512")
FEW = ("--slots", "1", "4", "--documents", "2", "--tokens", "64", "--decoded", "4", "--turns", "1")


@thorough("generation/test_exact.py")
@pytest.mark.parametrize("part", ["products", "operations", "answers"])
def test_parts_find_equal_bits(tmp_path, monkeypatch, part):
    import exact_sampling

    file = tmp_path / "exact.json"
    monkeypatch.setattr("sys.argv", ["exact_sampling.py", *TINY, *FEW, "--parts", part, "--json", str(file)])
    exact_sampling.main()
    rows = json.loads(file.read_text())["results"][part]
    assert rows
    for row in rows:
        if part == "products":
            shares = [value for name, value in row.items() if name.removesuffix(" rows").isdigit()]
            assert shares and set(shares) == {"100.0000%"}, row
        elif part == "operations":
            assert row["equal"] == "100.000%", row
        elif not row.get("near"):
            assert row["equal"] == 1.0 and row["largest"] == 0.0, row
