"""Tests of operations run kernels that other calls leave out until a GPU has."""

import pytest

from jaxglue.ops import backend


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    """Take kernels that no GPU has run, as it is tests that try them."""
    monkeypatch.setattr(backend, "UNTRIED", set())
