"""`make test` runs every part: a case that repeats one is marked beside a case that does not."""

import ast
from functools import cache
from pathlib import Path

import pytest
from selection import repeats

TESTS = Path(__file__).parent


@cache
def parsed() -> list[tuple[str, ast.Module]]:
    """Return names and syntax trees of the files of tests."""
    return [(path.name, ast.parse(path.read_text(encoding="utf-8"))) for path in TESTS.rglob("test_*.py")]


def calls(node: ast.AST, name: str) -> bool:
    """Return whether an expression calls a function of this name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def test_repeats_stand_beside_a_case_that_runs():
    repeated = []
    for name, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.List | ast.Tuple):
                marked = [calls(case, "repeat") for case in node.elts]
                assert not marked or not all(marked), f"{name}:{node.lineno}"
                repeated += [name] * sum(marked)
    assert "test_compile.py" in repeated


def test_no_test_is_marked_slow_but_as_a_repeat():
    named = [path.name for path in TESTS.rglob("*.py") if "mark.slow" in path.read_text(encoding="utf-8")]
    assert set(named) <= {"selection.py", "test_selection.py"}


def runs(node: ast.AST) -> bool:
    """Return whether `make test` runs a function of a file, or a case of it."""
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
        return False
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return not any(mark.startswith(("repeats_parts_of(", "thorough(", "pytest.mark.gpu")) for mark in marks)


def test_thorough_tests_name_a_file_whose_tests_run():
    named = {node.args[0].value for _, tree in parsed() for node in ast.walk(tree) if calls(node, "thorough")}
    trees = {name: ast.parse((TESTS / name).read_text(encoding="utf-8")) for name in named}
    assert named and {name for name, tree in trees.items() if not any(map(runs, tree.body))} == set()


def test_repeated_tests_run():
    nodes = [node for _, tree in parsed() for node in tree.body]
    marks = [mark for node in nodes if isinstance(node, ast.FunctionDef) for mark in node.decorator_list]
    repeated = {mark.args[0].value for mark in marks if calls(mark, "repeats_parts_of")}
    assert repeated and repeated - {node.name for node in nodes if runs(node)} == set()


def test_named_repeats_leave_a_case():
    cases = repeats({"a": 1, "b": 2}, "b")
    assert cases[0] == "a" and cases[1].values == ("b",) and cases[1].marks[0].name == "slow"
    with pytest.raises(AssertionError):
        repeats(["a"], "a")
    with pytest.raises(AssertionError):
        repeats(["a"], "c")
