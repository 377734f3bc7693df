"""Pages say what the code says: error texts, aliases, and links to every page."""

import ast
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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
    path = ROOT / "scripts" / "alias_tables.py"
    spec = importlib.util.spec_from_file_location("alias_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.render(page) == page, "run python scripts/alias_tables.py"


def test_every_page_and_picture_is_linked():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in DOCS.glob("*.md") if page.name != "index.md" and page.name not in index] == []
    pages = "".join(path.read_text(encoding="utf-8") for path in [*DOCS.glob("*.md"), ROOT / "README.md"])
    assert [picture.name for picture in DOCS.glob("*.png") if f"{picture.name})" not in pages] == []
