"""Registries of kinds."""

import sys

import pytest

from jaxglue import parts
from jaxglue.objectives.objective import OBJECTIVES
from jaxglue.parts import Registry, is_own, load_kinds, load_parts, pinned, require_parts


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


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package, toy-parts, whose entry point registers the objective toy."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "_packages", {})
    code = "from jaxglue.objectives.objective import OBJECTIVES\n@OBJECTIVES.register('toy')\nclass Toy: pass\n"
    (tmp_path / "toy_parts.py").write_text(code)

    def install(version):
        sys.modules.pop("toy_parts", None)
        info = tmp_path / "toy_parts.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-parts\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[jaxglue.parts]\ntoy = toy_parts\n")

    with OBJECTIVES.scope():
        yield install
    sys.modules.pop("toy_parts", None)


def test_a_run_records_the_packages_that_add_parts(install, caplog):
    assert pinned(()) == ()
    install("1.2")
    load_kinds()
    assert OBJECTIVES["toy"].__module__ == "toy_parts"
    recorded = pinned(("package:gone==3",))
    assert recorded == ("package:toy-parts==1.2",) and is_own(*recorded)
    require_parts(recorded, "config.toml")
    load_parts(recorded)
    assert not caplog.messages
    require_parts(["package:toy-parts==1.1"], "config.toml")
    assert "parts of toy-parts 1.1 are recorded, and 1.2 is installed" in caplog.text
    for read in (load_parts, lambda texts: require_parts(texts, "config.toml")):
        with pytest.raises(ValueError, match=r"the package gone 3 added parts, and is not installed: install it"):
            read(["package:gone==3"])
