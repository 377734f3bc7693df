"""The package root: lazy, complete, and cheap to import."""

import gc
import importlib
import subprocess
import sys

import pytest

import jaxglue

IMPORT = """
import sys, time
start = time.process_time()
import jaxglue
print(time.process_time() - start, *sorted({"jax", "numpy", "triton", "transformers"} & set(sys.modules)))
"""


def test_import_is_fast_and_loads_no_jax():
    runs = [subprocess.check_output([sys.executable, "-c", IMPORT], text=True).split() for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in runs) < 0.3
    assert not any(loaded for _, *loaded in runs)


@pytest.mark.parametrize("name", jaxglue.__all__)
def test_every_public_name_resolves(name):
    assert getattr(jaxglue, name)


def test_public_names_are_imported_without_searches_for_garbage(monkeypatch):
    import_module, searches = importlib.import_module, []
    monkeypatch.setattr(importlib, "import_module", lambda *of: searches.append(gc.isenabled()) or import_module(*of))
    assert jaxglue.__getattr__("plan") and {*searches} == {False} and gc.isenabled()


def test_dir_lists_public_names_only():
    assert dir(jaxglue) == jaxglue.__all__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "quickstart"}, "config: expected a TrainConfig or a dictionary of settings, got 'quickstart'"),
        ({"packing": True}, "unknown setting 'packing' has no counterpart: documents are always packed"),
    ],
)
def test_misplaced_settings_are_told_their_place(arguments, message):
    with pytest.raises(ValueError, match=message):
        jaxglue.train(**arguments)


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxglue.nothing  # noqa: B018
