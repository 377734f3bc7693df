"""Packages import only from packages below their own."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    {"__main__", "api"},
    {"commands"},
    {"training"},
    {"generation", "planner"},
    {"hf", "engine"},
    {"sharding"},
    {"models", "objectives"},
    {"data"},
    {"cli", "distributed", "ops"},
    {"recipe"},
    {"dialects"},
    {"config", "json_file", "yaml_file"},
    {"spelling"},
)
"""From the top; packages of one floor do not import each other."""


def packages() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted([*(ROOT / "jaxglue").rglob("*.py"), *(ROOT / "jaxglue" / "models").rglob("*.py")]):
        name = path.relative_to(ROOT / "jaxglue").parts[0].removesuffix(".py")
        files.setdefault(name, []).append(path)
    return {name: paths for name, paths in files.items() if name != "__init__"}


def imported_packages(path: Path) -> set[str]:
    """Every `jaxglue.NAME` that a file imports, inside functions too."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return {parts[1] for parts in (module.split(".") for module in modules) if parts[0] == "jaxglue" and parts[1:]}


def test_every_package_has_a_floor():
    assert set(packages()) == set().union(*FLOORS)


@pytest.mark.parametrize("package", sorted(set().union(*FLOORS)))
def test_imports_go_down(package):
    floor = next(index for index, names in enumerate(FLOORS) if package in names)
    below = {package}.union(*FLOORS[floor + 1 :])
    upward = {
        f"{path.relative_to(ROOT)} imports jaxglue.{name}"
        for path in packages()[package]
        for name in imported_packages(path) & set().union(*FLOORS) - below
    }
    assert not upward
