"""Pages say what the code says: error texts, aliases, and links to every page."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxglue

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README_AND_INDEX = ROOT / "README.md", DOCS / "index.md"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()
    assert "WeightFormat.quantize" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference():
    page = load_script("api_reference").render()
    titles = re.findall(r"^### `(\w+)`$", page, re.M)
    assert {*jaxglue.__all__} - {"__version__"} <= {*titles}
    assert "- `recipe`: of a training run; settings win over it." in page
    assert "- `batch_size: int`: Rows of a micro-batch on one GPU." in page


def test_no_text_installs_the_package_from_an_index():
    """The package is on no index: texts install from the clone."""
    suffixes = {".py", ".md", ".ipynb", ".toml", ".yml"}
    folders = ("jaxglue", "models", "docs", "scripts", "examples", "benchmarks", "tests")
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes}
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?jaxglue\b|['\"`]jaxglue\[\w")
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for path in [*paths, *ROOT.glob("*.md"), ROOT / "Makefile"]
        for text in wrong.findall(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_error_texts_of_troubleshooting_exist():
    headings = re.findall(r"^## (.*)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    assert len(headings) >= 10
    texts = "\n".join(_texts())
    assert [part for heading in headings for part in heading.split(" … ") if part not in texts] == []


def _texts():
    for path in [*(ROOT / "jaxglue").rglob("*.py"), *(ROOT / "models").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_alias_tables_are_those_of_the_flags():
    module = load_script("alias_tables")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.render(page) == page, "run python scripts/alias_tables.py"


def test_tables_have_a_header():
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M):
            assert re.match(r".*\n\|[\s:|-]+\|\n", table), f"{page.name}: {table}"


def test_files_that_pages_name_exist():
    """By name alone, or with a folder."""
    folders = ("jaxglue", "models", "benchmarks", "scripts", "examples", "tests")
    paths = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    missing = {
        f"{page.name}: {name}"
        for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
        for name in re.findall(r"`(?:python )?([\w./]+\.py)\b", page.read_text(encoding="utf-8"))
        if not name.startswith("vllm/") and not any(f"/{path}".endswith(f"/{name}") for path in paths)
    }
    assert not missing


def test_design_names_folders_and_names_that_exist():
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    paths = [path for folder in ("jaxglue", "models", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    known = {*re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in paths))}
    folders = {part for path in paths for part in path.relative_to(ROOT).parts[:-1]} | {"scripts", "recipes", "results"}
    named = [name for name in re.findall(r"`([^`\n]+)`", page) if not name.endswith((".py", ".json", ".toml"))]
    code = re.sub("#.*", "", "".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)))
    assert len(named) > 100
    assert {name for name in named if name.endswith("/") and not folders >= {*name.strip("/").split("/")}} == set()
    assert {*re.findall(r"[A-Za-z_]\w+", " ".join(named) + code)} - known - folders == set()


def test_readme_opens_as_the_site_does():
    openings = [
        re.search(r"^# jaxglue\n\n(.*)", page.read_text(encoding="utf-8"), re.M)[1] for page in README_AND_INDEX
    ]
    assert openings[0] == openings[1]


def test_shipped_recipes_are_named():
    page = (DOCS / "command.md").read_text(encoding="utf-8")
    recipes = [path.stem for path in (ROOT / "jaxglue" / "recipes").glob("*.toml")]
    assert [name for name in recipes if f"`{name}`" not in page] == []


def test_promises_name_tests_that_exist():
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", (DOCS / "reliability.md").read_text(encoding="utf-8"), re.M)
    named = [spec for row in rows for spec in re.findall(r"`([^`]*test_\w+\.py[^`]*)`", row)]
    assert len(named) > 30
    for spec in named:
        name, _, words = spec.partition(" -k ")
        files = [path for path in (ROOT / "tests").rglob("test_*.py") if str(path).endswith(f"/{name}")]
        tests = re.findall(r"^def (test_\w+)", "\n".join(path.read_text(encoding="utf-8") for path in files), re.M)
        for word in words.strip('"').split(" or "):
            assert any(word in test for test in tests), spec


def test_every_page_and_picture_is_linked():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    names = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    missing = [name for name in names if name != "index.md" and f"({name}" not in index]
    assert not missing, "link them in docs/index.md, and list them in mkdocs.yml"
    pages = "".join(path.read_text(encoding="utf-8") for path in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    assert [picture.name for picture in DOCS.glob("*.png") if f"{picture.name})" not in pages] == []


def test_rewards_of_the_page_take_texts_and_messages():
    page = (DOCS / "rl.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(re.search(r"^```python\n(# rewards\.py.*?)^```", page, re.M | re.S)[1], names)
    assert names["diverse"](["p"] * 3, ["a", "b", "a"]) == [0.5, 1, 0.5]
    answers = [[{"role": "assistant", "content": text}] for text in "aba"]
    assert names["diverse"](["p"] * 3, answers) == [0.5, 1, 0.5]
    assert names["exact_match"](" 7\n", "7") == 1
