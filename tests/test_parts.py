"""Registries of kinds."""

import sys

import pytest

from jaxglue.parts import Registry


def test_built_in_things_are_imported_when_they_are_looked_up():
    registry = Registry[object]("shape", {"circle": "this:d", "square": 4})
    sys.modules.pop("this", None)
    assert [*registry] == ["circle", "square"] and "circle" in registry and "this" not in sys.modules
    assert registry["circle"] is registry["circle"] is sys.modules["this"].d


def test_a_name_stands_for_one_thing():
    registry = Registry[object]("optimizer", {"lion": 1})
    with pytest.raises(ValueError, match="an optimizer named 'lion' is registered already"):
        registry.add("lion", 2)
    assert registry["lion"] == 1


def test_an_unknown_name_is_refused_with_those_known_and_the_nearest():
    registry = Registry[int]("optimizer", {"lion": 1, "adamw": 2})
    with pytest.raises(
        ValueError, match=r"optimizer 'adam' is not known: expected lion \| adamw; did you mean adamw\?"
    ):
        registry.find("adam")
    assert registry.find("lion") == 1 and registry.get("adam") is None


def test_a_scope_forgets_what_is_added_inside():
    registry = Registry[int]("optimizer", {"lion": 1})
    with registry.scope({"lion": 2}):
        assert registry.register("muon")(3) == 3
        assert {**registry} == {"lion": 2, "muon": 3}
    assert {**registry} == {"lion": 1}
