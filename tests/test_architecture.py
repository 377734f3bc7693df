"""Imports go down the floors, in no cycle, to modules that exist; private names stay in their modules."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    {"__main__", "tinker"},
    {"api"},
    {"commands"},
    {"serve", "training"},
    {"rl", "ui"},
    {"generation", "planner"},
    {"hf", "engine"},
    {"sharding"},
    {"models", "objectives", "text"},
    {"data"},
    {"vision"},
    {"distributed", "ops"},
    {"parts"},
    {"settings"},
    {"files"},
    {"environments", "terminal"},
)
"""From the top; packages of one floor do not import each other."""


def packages() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted([*(ROOT / "jaxglue").rglob("*.py"), *(ROOT / "jaxglue" / "models").rglob("*.py")]):
        name = path.relative_to(ROOT / "jaxglue").parts[0].removesuffix(".py")
        files.setdefault(name, []).append(path)
    return {name: paths for name, paths in files.items() if name not in ("__init__", "recipes")}  # data of recipes


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_packages(path: Path) -> set[str]:
    """Every `jaxglue.NAME` that a file imports, inside functions too."""
    modules = (f"{module}.{name}" if name else module for module, name in imports(path))
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


def sources(*folders: str) -> list[Path]:
    """Every Python file; `models/` under its installed name, which is a link."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return found + (sorted((ROOT / "jaxglue" / "models").glob("*.py")) if "jaxglue" in folders else [])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources("jaxglue")}


@cache
def imports(path: Path) -> list[tuple[str, str | None]]:
    """Return (module, name) of each import, inside functions and for type checkers too."""
    found = list[tuple[str, str | None]]()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
    return found


def test_imported_modules_of_ours_exist():
    """The type checker takes a missing module for one without types."""
    missing = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("jaxglue", "benchmarks", "scripts", "examples", "tests")
        for module, _ in imports(path)
        if module.split(".")[0] == "jaxglue" and module not in MODULES
    }
    assert not missing


@cache
def imported_modules() -> dict[str, set[str]]:
    """Return the modules that each of ours imports."""
    return {
        name: {found if (found := f"{module}.{part}") in MODULES else module for module, part in imports(path)} - {name}
        for name, path in MODULES.items()
    }


def test_modules_import_each_other_in_no_cycle():
    edges = imported_modules()
    reached = {name: reachable(name, edges) for name in edges}
    cycles = {frozenset(other for other in reached[name] if name in reached[other]) for name in reached}
    assert cycles == {frozenset()}


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Every module that one imports, directly or through others."""
    found, waiting = set[str](), [start]
    while waiting:
        new = edges[waiting.pop()] & edges.keys() - found
        found |= new
        waiting += new
    return found


OPEN = {"_asdict", "_exit", "_field_defaults", "_fields", "_make", "_replace"}
"""Underscored names that are public: of `NamedTuple` and `os`."""
HELP = "argparse has no public way to lay out help"
AGGREGATE = "Triton has no public kind of value that holds tensors and constants"
TRITON = "Triton has no public way to add a builtin, or to see a tile in another layout"
PRIVATE_OF_OTHERS = {
    "benchmarks/peers/engines.py": {
        "_attn_implementation": "transformers has no public name for the attention that it took",
        "_enable_hf_packed_attention": "switches a peer's packing on, as its trainer does",
    },
    "benchmarks/programs.py": {"jax._src.lib": "XLA's parser of HLO modules"},
    "jaxglue/settings/flags.py": {"_ArgumentGroup": HELP, "_actions": HELP},
    "jaxglue/data/hub_client.py": {
        "_http": "a client of the factory in use can be extended by no public name",
        "_GLOBAL_CLIENT_FACTORY": "likewise",
    },
    "jaxglue/data/readers.py": {"_fingerprint": "the identity of a data set's rows, which `datasets` does not publish"},
    "jaxglue/engine/compiler.py": {"_cache_size": "JAX's only count of a function's programs"},
    "jaxglue/engine/program_cache.py": {"jax._src.compilation_cache": "JAX has no setting for the compressor"},
    "jaxglue/generation/programs.py": {"_cache_size": "JAX's only count of a function's programs"},
    "jaxglue/ops/attention/cudnn.py": {
        "jax._src.cudnn": "cuDNN's packed attention has no public entry",
        "_dot_product_attention_bwd_rule": "its backward pass neither",
    },
    "jaxglue/ops/attention/hopper/backward_tiles.py": {"_aggregate": AGGREGATE},
    "jaxglue/ops/attention/hopper/sums.py": {
        "triton._C.libtriton": TRITON,
        "triton.experimental.gluon.language._core": TRITON,
        "_convert_to_ir_values": TRITON,
        "_reinterpret": TRITON,
    },
    "jaxglue/ops/attention/hopper/tiles.py": {"_aggregate": AGGREGATE},
    "jaxglue/ops/moe/few_rows_ring.py": {"_reinterpret": TRITON},
    "jaxglue/ops/tile_ring.py": {"_aggregate": AGGREGATE},
    "jaxglue/training/checkpoint.py": {
        "orbax.checkpoint._src.path.atomicity": "orbax has no public way to write a checkpoint under another name"
    },
}
"""Private names and modules of other packages, by file, each with the reason why no public one serves."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_" and name not in OPEN


def own_names(path: Path) -> set[str]:
    """Private names that a file defines: functions, classes, variables, attributes of `self` and `cls`."""
    nodes = list(ast.walk(tree(path)))
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    attributes = {node.attr for node in stored if isinstance(node, ast.Attribute) and is_own(node.value)}
    return named | attributes | {node.id for node in stored if isinstance(node, ast.Name)}


def is_own(node: ast.expr) -> bool:
    """Tell whether an expression is `self`, `cls` or `super()`, whose private names a class inherits."""
    called = node.func if isinstance(node, ast.Call) else node
    return isinstance(called, ast.Name) and called.id in {"self", "cls", "super"}


def foreign_names(path: Path) -> Iterator[str]:
    """Yield every private name or module that a file takes from another."""
    own = own_names(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if not is_own(node.value):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "._src." in node.value:
            yield node.value
    for module, name in imports(path):
        if any(map(is_private, module.split("."))):
            yield module
        elif name is not None and is_private(name):
            yield name


def test_private_names_stay_in_their_modules():
    unlisted = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources("jaxglue", "benchmarks", "scripts", "examples")
        for name in set(foreign_names(path)) - PRIVATE_OF_OTHERS.get(path.relative_to(ROOT).as_posix(), {}).keys()
    }
    assert not unlisted


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("thing._inner", ["_inner"]),
        ("from jaxglue.engine.policy import _preset", ["_preset"]),
        ("import jax._src.core", ["jax._src.core"]),
        ("self._inner + cls._other + super()._third", []),
        ("def _inner(): ...\nthing._inner", []),
        ("pair._replace(x=1).__class__", []),
    ],
)
def test_private_names_are_recognized(tmp_path, line, found):
    path = tmp_path / "module.py"
    path.write_text(line)
    assert list(foreign_names(path)) == found


def test_one_module_prints():
    """Others would print markup and control characters of names and files as they are."""
    printing = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("jaxglue")
        if path.name != "terminal.py"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and "file" not in {k.arg for k in node.keywords}
    }
    assert not printing
    assert [path.name for path in sources("jaxglue") if "rich.console" in path.read_text()] == ["console.py"]
