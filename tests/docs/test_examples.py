"""The Python examples and the notebook of the documentation run as they stand."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from selection import repeat, repeats_parts_of

import jaxglue
from jaxglue.models import FAMILIES, config_from_hf
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.objective import OBJECTIVES
from jaxglue.ops.choices import QUANTIZE
from jaxglue.ops.quant.formats import FORMATS, find_format
from jaxglue.training.config import OptimizerConfig
from jaxglue.training.optimizer import OPTIMIZERS

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.fixture
def registries():
    """Forget what a page's examples register."""
    offered = [*QUANTIZE]
    with OBJECTIVES.scope(), FORMATS.scope(), OPTIMIZERS.scope(), FAMILIES.scope():
        yield
    QUANTIZE[:] = offered


REPEATED = ("Rows in memory", "Callbacks", "Metrics", "An optimizer, a tokenizer", "A loop of your own")
REPEATED += ("Load a model and run it", "Operations")
"""Sections of python.md whose parts run elsewhere: in test_callbacks.py, test_own_parts.py and test_session.py of
tests/training, and in tests/ops."""


@pytest.mark.parametrize(
    ("page", "repeated"),
    [("python", REPEATED), repeat("python", ()), ("own_layers", ()), ("adding_a_model", ()), ("extend", ())],
)
def test_examples_of_a_page_run_in_order(page, repeated, registries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict = {"__name__": page} | ({"jnp": jnp} if repeated else {})
    sections = {
        text.split("\n", 1)[0]: text for text in (DOCS / f"{page}.md").read_text(encoding="utf-8").split("\n## ")
    }
    assert sections.keys() >= set(repeated)
    for title, section in sections.items():
        for number, block in enumerate(_BLOCK.findall(section), start=1):
            code = compile(block, f"{page}.md, {title}, example {number}", "exec")
            if title not in repeated:
                exec(code, names)


def test_examples_name_what_the_package_has():
    named = set(
        re.findall(r"\bjaxglue\.([A-Za-z]\w*)", "".join(_BLOCK.findall((DOCS / "python.md").read_text("utf-8"))))
    )
    assert "Session" in named and not [name for name in named if not hasattr(jaxglue, name)]


def test_parts_of_the_guide_are_known_by_their_names(registries, tiny_config):
    text = "\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("adding_a_model", "extend"))
    names: dict = {"__name__": "extend"}
    exec("\n".join(_BLOCK.findall(text)), names)
    raw = {**tiny_config, "model_type": "my_model"}
    assert config_from_hf(raw).layer_windows[:2] == (None, 1024)
    assert OptimizerConfig(optimizer="momentum").kind.title == "momentum"
    assert ObjectiveConfig(objective="margin", beta=0.5).make().losses(
        SimpleNamespace(chosen_mean=jnp.array([0.0, 1.0]), rejected_mean=jnp.array([0.0, 0.0]))
    ).tolist() == [0.5, 0.0]
    weight = find_format("signs").quantize(jnp.array([[1.0, -3.0], [2.0, 2.0]]))
    assert weight.dequantize(jnp.float32).tolist() == [[2, -2], [2, 2]]


def test_examples_are_short():
    blocks = _BLOCK.findall((DOCS / "python.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 9
    assert all(len(block.splitlines()) < 15 for block in blocks)


@repeats_parts_of("test_examples_of_a_page_run_in_order")
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
