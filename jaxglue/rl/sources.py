"""The files that a function of a user's consists of: its own, and those that it imports from beside it."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from jaxglue.files.regular_file import read_regular


def source_files(file: Path) -> list[Path]:
    """Return a Python file and those that it imports, also inside of functions, from its folder or PYTHONPATH.

    Modules that are imported by a name made at run time are not among them.
    """
    roots = [file.parent, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    files, waiting = dict[Path, None](), [file]
    while waiting:
        path = waiting.pop()
        if path in files or not path.is_file():
            continue
        files[path] = None
        for folder, parts in _imports(path):
            for root in roots if folder is None else [folder]:
                # A package's __init__ runs before its modules; the last part may be a name in one.
                bases = [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
                waiting += [place for base in bases for place in (base.with_suffix(".py"), base / "__init__.py")]
    return list(files)


def _imports(path: Path) -> Iterator[tuple[Path | None, list[str]]]:
    """Yield the parts of imported names, below a folder or, at None, wherever modules are looked for."""
    try:
        tree = ast.parse(read_regular(path))
    except (SyntaxError, ValueError, RecursionError):  # its import will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield None, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else None
            base = node.module.split(".") if node.module else []
            for alias in node.names:
                yield folder, [*base, alias.name]
