"""A wheel has every package."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_of_the_library_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxglue").rglob("*.py")}
    assert set(listed) == {".".join(folder.parts) for folder in folders} | {"jaxglue.models"}
