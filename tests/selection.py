"""The choice of `make test`: cases that repeat a part of another case are left to `make test-all`."""

from typing import Any

import pytest


def repeat(*values: Any, **options: Any):
    """Mark a case of a parametrized test as one that repeats a part: another shape, family or policy of the same."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def repeats_parts_of(test: str):
    """Mark a test whose parts another one, of this name, runs in `make test`, each by itself or in a smaller case."""
    return pytest.mark.slow(test)


def thorough(test: str):
    """Mark tests that take parts through many inputs or other programs; those of `test`, a file, run the parts once."""
    return pytest.mark.slow(test)


def repeats(cases: Any, *names: Any) -> list:
    """Return cases of one value, those of these names marked as repeats."""
    assert set(names) < set(cases), "some case runs in make test"
    return [repeat(case) if case in names else case for case in cases]
