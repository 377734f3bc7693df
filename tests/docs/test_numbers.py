"""Numbers of the pages and their pictures are those of the result files."""

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def claims():
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def speeds():
    import plot_sft_step

    return plot_sft_step


def compared(speeds):
    return speeds.pairs(json.loads(speeds.RESULTS.read_text(encoding="utf-8"))["results"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_numbers_of_a_page_are_those_of_the_files(claims, speeds, page):
    name = page.relative_to(ROOT).as_posix()
    text = speeds.TABLE.sub("", page.read_text(encoding="utf-8"))
    wrong = claims.problems(
        name, text, claims.read_claims().get(name, {}), all_numbers=name.startswith(claims.BOUND)
    )
    assert not wrong, "python scripts/claims.py proposes entries of docs/measured/claims.toml"


def test_claims_are_of_pages_that_exist(claims):
    assert {*claims.read_claims()} <= {page.relative_to(ROOT).as_posix() for page in PAGES}


def test_tables_of_speed_are_those_of_the_file(speeds):
    for page in speeds.PAGES:
        assert speeds.format_table(compared(speeds)) in page.read_text("utf-8"), "run benchmarks/plot_sft_step.py"
