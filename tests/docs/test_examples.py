"""The Python examples and the notebook of the documentation run as they stand."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", ["python", "own_layers"])
def test_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict = {"__name__": page}
    for number, block in enumerate(_BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8")), start=1):
        exec(compile(block, f"{page}.md, example {number}", "exec"), names)


def test_examples_are_short():
    blocks = _BLOCK.findall((DOCS / "python.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 9
    assert all(len(block.splitlines()) < 15 for block in blocks)


def test_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((DOCS / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "STEPS = 500" in sources[0]
    names: dict = {"__name__": "notebook"}
    for number, source in enumerate(sources, start=1):
        few = source.replace("STEPS = 500", "STEPS = 2")
        exec(compile(few, f"quickstart.ipynb, cell {number}", "exec"), names)
    assert names["summary"].steps == 2 and (tmp_path / "runs/notebook/adapter").is_dir()
