import json
from functools import partial

import jax
import pytest

pytest.importorskip("jax_triton")
from jax_triton.triton_lib import CompilationResult

from jaxglue.ops.kernel_cache import cached


@pytest.fixture
def keep_in():
    before = jax.config.jax_compilation_cache_dir
    yield partial(jax.config.update, "jax_compilation_cache_dir")
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def folder(keep_in, tmp_path):
    keep_in(str(tmp_path))
    return tmp_path / "triton"


@pytest.fixture
def compiled():
    return []


@pytest.fixture
def compile_ir(compiled):
    def compile_ir(ir, backend, options, gpu):
        compiled.append(ir)
        return CompilationResult(binary=f"ptx of {ir}", name="k", shared_mem_bytes=7, ttgir="a", llir="b")

    return cached(compile_ir)


def test_a_kernel_is_compiled_once_for_each_input(folder, compile_ir, compiled):
    first, again = (compile_ir("ir", None, "options", "gpu") for _ in range(2))
    assert compiled == ["ir"]
    assert (again.binary, again.shared_mem_bytes) == (first.binary, first.shared_mem_bytes)
    for other in (("other", None, "options", "gpu"), ("ir", None, "others", "gpu"), ("ir", None, "options", "next")):
        compile_ir(*other)
    assert len(compiled) == 4
    assert all(path.suffix == ".json" for path in folder.iterdir())


@pytest.mark.parametrize("text", ["", "[1]", json.dumps({"binary": "x"})])
def test_a_damaged_entry_is_replaced(folder, compile_ir, compiled, text):
    compile_ir("ir", None, "options", "gpu")
    (entry,) = folder.iterdir()
    whole = entry.read_text()
    entry.write_text(text or whole.replace("ptx", "ptz"))
    assert compile_ir("ir", None, "options", "gpu").binary == "ptx of ir"
    assert len(compiled) == 2
    assert entry.read_text() == whole


def test_nothing_is_kept_without_a_compilation_cache(keep_in, compile_ir, compiled, tmp_path):
    keep_in(None)
    for _ in range(2):
        compile_ir("ir", None, "options", "gpu")
    assert len(compiled) == 2
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_warning(folder, compile_ir, caplog):
    folder.write_text("in the way")
    assert compile_ir("ir", None, "options", "gpu").binary == "ptx of ir"
    assert "not kept" in caplog.text
