"""docs/walk.md names functions that exist where its links lead."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALK = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
CODE = "https://github.com/jaxglue/jaxglue/blob/main/"
LINK = re.compile(rf"\[`([\w.]+)`\]\({CODE}([^)]+)\)")


def defined(path: Path) -> set[str]:
    """Names of a file's functions and classes, and of these classes' methods with the class before a dot."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    kinds = ast.FunctionDef | ast.ClassDef
    methods = {
        f"{each.name}.{part.name}"
        for each in body
        if isinstance(each, ast.ClassDef)
        for part in each.body
        if isinstance(part, kinds)
    }
    return methods | {each.name for each in body if isinstance(each, kinds)}


def test_functions_of_the_walk_are_where_its_links_lead():
    links = LINK.findall(WALK)
    assert len(links) > 20 and len(WALK.splitlines()) <= 300
    assert WALK.count(CODE) == len(links)
    missing = [f"{name} in {path}" for name, path in links if name not in defined(ROOT / path)]
    assert not missing
