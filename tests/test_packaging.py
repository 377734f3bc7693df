"""A wheel has every package."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import find_packages

ROOT = Path(__file__).parents[1]


def test_every_folder_of_the_library_is_installed():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxglue").rglob("*.py")} | {Path("jaxglue/models")}
    folders -= {Path("jaxglue/recipes/quickstart")}  # an example's file, which is package data
    assert set(find_packages(ROOT, **find)) == {".".join(folder.parts) for folder in folders}


def test_a_version_is_everywhere_the_same_and_has_release_notes():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## ([\d.]+) ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1] == version


def test_tested_versions_satisfy_the_requirements():
    """They are constraints of every direct requirement, without addresses."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    tested = {canonicalize_name(name): found for name, found in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["test"],
    ]
    for requirement in map(Requirement, asked):
        if requirement.name != "jaxglue":
            assert tested[canonicalize_name(requirement.name)] in requirement.specifier


def test_workflows_run_the_checks_on_every_supported_python():
    flow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert flow["strategy"]["matrix"]["python"] == [c.rpartition(" ")[2] for c in classifiers if ":: 3." in c]
    assert ".ci/run" in [step.get("run") for step in flow["steps"]]


def test_releases_are_tried_first_and_published_without_a_secret():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text and "password" not in text
    assert (jobs["try"]["needs"], jobs["publish"]["needs"]) == ("build", "try")
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "tag" in jobs["publish"]["if"]
    assert {"python -m build"} <= {step.get("run") for step in jobs["build"]["steps"]}
