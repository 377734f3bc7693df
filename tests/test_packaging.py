"""A wheel has every package."""

import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[1]


def test_every_folder_of_the_library_is_installed():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxglue").rglob("*.py")} | {Path("jaxglue/models")}
    assert set(find_packages(ROOT, **find)) == {".".join(folder.parts) for folder in folders}
