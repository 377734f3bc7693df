"""Compiled Triton kernels on disk, beside XLA's programs: jax-triton compiles every kernel again in every process."""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax_triton.triton_lib import CompilationResult

from jaxglue.files.atomic import atomic_file

_VERSIONS = [version(package) for package in ("triton", "jax-triton")]
_DUMPS = {"ttgir": "", "llir": ""}
"""Fields of a result that are only written to dumps."""
_log = logging.getLogger(__name__)

Compile = Callable[[Any, Any, Any, Any], CompilationResult]
"""Compiles Triton IR, in place, with a backend and its options for a GPU."""


def cached(compile_ir: Compile) -> Compile:
    """Return a compiler that keeps its results in the folder `triton` of JAX's compilation cache, where there is one.

    A key is the whole input: intermediate representation, options, GPU and versions.
    """

    def compile_cached(ir: Any, backend: Any, options: Any, gpu: Any) -> CompilationResult:
        cache = jax.config.jax_compilation_cache_dir
        if not cache or "://" in cache:
            return compile_ir(ir, backend, options, gpu)
        key = _digest("\n".join(map(str, (*_VERSIONS, options, gpu, ir))))
        path = Path(cache) / "triton" / f"{key}.json"
        if (result := _read(path)) is None:
            result = compile_ir(ir, backend, options, gpu)
            _write(path, result)
        return result

    return compile_cached


def _read(path: Path) -> CompilationResult | None:
    try:
        digest, _, text = path.read_text().partition("\n")
        return CompilationResult(**json.loads(text), **_DUMPS) if digest == _digest(text) else None
    except (OSError, ValueError, TypeError):  # absent, or not one of ours: compiled, and written, again
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, result: CompilationResult) -> None:
    fields = {name: value for name, value in asdict(result).items() if name not in _DUMPS}
    try:
        text = json.dumps(fields)
        with atomic_file(path) as temporary:
            temporary.write_text(f"{_digest(text)}\n{text}")
    except OSError as error:
        _log.warning("compiled kernels are not kept: %s", error)
