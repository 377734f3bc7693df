"""Write the API reference from the docstrings of the public names and of the seams; a hook of mkdocs.

python scripts/api_reference.py prints the page. Sources are parsed and not imported.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = "api.md"
SETTINGS = {
    "training.config": ("ModelConfig", "OptimizerConfig", "RunConfig"),
    "data.config": ("DataConfig",),
    "objectives.config": ("ObjectiveConfig",),
    "models.lora_config": ("LoraConfig",),
    "distributed": ("DistributedConfig",),
}
"""Groups of `TrainConfig`, by module below `jaxglue`."""
SEAMS = {
    "objectives.objective": ("Objective", "TargetValues"),
    "objectives.answers": ("PairObjective",),
    "training.optimizer": ("Optimizer", "OptimizerKind"),
    "training.optax_optimizer": ("OptaxOptimizer",),
    "ops.quant.formats": ("Quantized", "WeightFormat", "Stored"),
    "models.family": ("Family", "Parts", "NormNames", "ExpertParts"),
    "models.config": ("DecoderConfig",),
}
"""Modules below `jaxglue` and their names, of what `extend.md` adds from outside."""


def render() -> str:
    """Return the page."""
    parts = [
        "# API reference",
        "Made from docstrings. Public names are imported from `jaxglue`; everything else may change between versions. "
        "[From Python](python.md) has examples, [Add a model, …](extend.md) those of the seams.",
        "## Public names",
        *(text for module, names in _public().items() for text in _names(module, names)),
        "## Settings",
        "The groups of `TrainConfig`; every field is a flag and a key of a recipe.",
        *(text for module, names in SETTINGS.items() for text in _names(module, names)),
        "## Seams",
        *(text for module, names in SEAMS.items() for text in _names(module, names)),
    ]
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the page to mkdocs' files."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=render()))
    return files


def _public() -> dict[str, tuple[str, ...]]:
    """Return `jaxglue._MODULES`, read from its source."""
    for node in ast.parse((ROOT / "jaxglue/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            return ast.literal_eval(node.value)
    raise AssertionError("jaxglue/__init__.py has no _MODULES")


def _names(module: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the sections of a module's names; names that it imports are looked up where they are defined."""
    path = ROOT / "jaxglue" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = _definitions(path)
    for name in names:
        node = found.get(name) or _imported(path, name)
        home = f"jaxglue.{module}"
        yield f"### `{name}`"
        yield f"`jaxglue.{name}`, defined in `{home}`." if name in _public().get(module, ()) else f"From `{home}`."
        yield from _class(node) if isinstance(node, ast.ClassDef) else _function(node, node.name)


def _definitions(path: Path) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _imported(path: Path, name: str) -> ast.ClassDef | ast.FunctionDef:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            source = ROOT / node.module.replace(".", "/")
            source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
            return _definitions(source).get(name) or _imported(source, name)
    raise AssertionError(f"{path} neither defines nor imports {name}")


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(map(ast.unparse, node.bases))
    yield f"```python\nclass {node.name}{f'({bases})' if bases else ''}\n```"
    yield from _doc(node)
    fields = list(_fields(node))
    if fields:
        yield "\n".join(fields)
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or (method.name.startswith("_") and method.name != "__call__"):
            continue
        if ast.get_docstring(method):
            yield from _function(method, f"{node.name}.{method.name}", level="####")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each public field, with the docstring below it."""
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if field.target.id.startswith("_") or field.target.id == "help_layout":
            continue
        kind, default = ast.unparse(field.annotation), "" if field.value is None else f" = {ast.unparse(field.value)}"
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            text = " ".join(below.value.value.split())
        yield f"- `{field.target.id}: {kind}{default}`" + (f": {_plain(text)}" if text else "")


def _function(node: ast.FunctionDef, name: str, level: str = "") -> Iterator[str]:
    if level:
        yield f"{level} `{name}`"
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    decorated = any(ast.unparse(each) == "property" for each in node.decorator_list)
    call = f"{node.name}{returns.replace(' ->', ':')}" if decorated else f"{node.name}({arguments}){returns}"
    yield f"```python\n{call}\n```"
    yield from _doc(node)


def _doc(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Yield the paragraphs of a docstring; sections such as Args become lists."""
    for paragraph in inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n"):
        title, _, body = paragraph.partition("\n")
        if not re.fullmatch(r"[A-Z]\w+:", title):
            yield f"```text\n{paragraph}\n```" if paragraph.startswith("    ") else _plain(paragraph)
            continue
        items = re.split(r"\n(?=\S)", inspect.cleandoc(body))
        lines = [re.sub(r"^(\*{0,2}[\w., ]+):", r"`\1`:", " ".join(item.split())) for item in items]
        yield f"**{title[:-1]}**"
        yield "\n".join(f"- {_plain(line)}" for line in lines)


def _plain(text: str) -> str:
    """Escape what Markdown would read as a tag or a link, outside of code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([<\[\]*])", r"\\\1", p) for p in pieces)


if __name__ == "__main__":
    print(render())
