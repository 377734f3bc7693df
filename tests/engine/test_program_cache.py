"""Programs and choices on disk: one process compiles at a time, damage is replaced, errors are one line each."""

import json
import os
import resource
import threading
import warnings
import zlib

import jax
import jax.numpy as jnp
import pytest
from filelock import FileLock, Timeout
from jax.experimental.compilation_cache import compilation_cache

from jaxglue.engine import program_cache
from jaxglue.engine.program_cache import FOLDER, check_tuning, explain_cache_errors, keep_programs, note_tuning


@pytest.fixture
def folder(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    keep_programs(tmp_path / "xla")
    yield tmp_path / "xla"
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
    compilation_cache.reset_cache()


def compile_program(number=0):
    return jax.jit(lambda x: jnp.sin(x) + number).lower(1.0).compile()


def test_folder_is_locked_while_a_program_compiles(folder):
    seen = []

    def look(event, **_):
        if event == program_cache._BEGIN:
            with pytest.raises(Timeout):
                FileLock(folder / ".jaxglue.lock").acquire(timeout=0)
            seen.append(event)

    jax.monitoring.register_event_listener(look)
    try:
        compile_program()
    finally:
        jax.monitoring.unregister_event_listener(look)
    assert seen
    FileLock(folder / ".jaxglue.lock").acquire(timeout=0).lock.release()


def test_a_process_waits_while_another_compiles(folder, monkeypatch, caplog):
    monkeypatch.setattr(program_cache, "_PATIENCE", 0.05)
    folder.mkdir()
    other = FileLock(folder / ".jaxglue.lock", thread_local=False)
    other.acquire()
    threading.Timer(0.3, other.release).start()
    compile_program()
    assert not other.is_locked
    assert caplog.text.count("waiting for another process") == 1


def test_waiting_ends(folder, monkeypatch, caplog):
    monkeypatch.setattr(program_cache, "_PATIENCE", 0.01)
    monkeypatch.setattr(program_cache, "_LONGEST", 0.1)
    folder.mkdir()
    with FileLock(folder / ".jaxglue.lock"):
        compile_program()
    assert "this one goes on" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"x", b"\x78\x9c123"])
def test_damaged_program_is_replaced(folder, damage, caplog):
    compile_program()
    (entry,) = folder.glob("*-cache")
    entry.write_bytes(damage)
    jax.clear_caches()
    with warnings.catch_warnings(action="default"):
        explain_cache_errors()
        compile_program()
    assert "removed damaged programs (1)" in caplog.text
    assert len(entry.read_bytes()) > 100


def test_errors_of_writing_are_one_line(folder, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with warnings.catch_warnings(action="default"):
            explain_cache_errors()
            for number in range(3):
                compile_program(number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("cannot be kept") == caplog.text.count("File too large") == 1


def test_programs_are_kept_with_a_checksum(folder, monkeypatch):
    from jax._src import compilation_cache as compression

    monkeypatch.setattr(compression, "zstandard", object())
    keep_programs(folder)
    stored = bytearray(compression.compress_executable(b"program" * 99))
    stored[len(stored) // 2] ^= 1
    with pytest.raises(zlib.error):
        compression.decompress_executable(bytes(stored))


def write(cache, **choices):
    (cache / FOLDER / "version").mkdir(parents=True, exist_ok=True)
    for name, text in choices.items():
        (cache / FOLDER / "version" / name).write_text(text)


def test_damaged_choices_are_removed_and_new_ones_noted(tmp_path, caplog):
    check_tuning(tmp_path)
    assert not os.listdir(tmp_path)
    write(tmp_path, a="algorithm: 1", b="algorithm: 2")
    note_tuning(tmp_path)
    write(tmp_path, a="algorithm: 3", c="algorithm: 4")
    check_tuning(tmp_path)
    assert sorted(os.listdir(tmp_path / FOLDER / "version")) == ["b", "c"]
    assert "removed damaged choices of algorithms (1)" in caplog.text
    write(tmp_path, a="algorithm: 1")
    check_tuning(tmp_path)
    assert sorted(os.listdir(tmp_path / FOLDER / "version")) == ["a", "b", "c"]


def test_damaged_digests_are_written_again(tmp_path):
    write(tmp_path, a="algorithm: 1")
    (tmp_path / ".jaxglue.tuned.json").write_text("[")
    check_tuning(tmp_path)
    assert json.loads((tmp_path / ".jaxglue.tuned.json").read_text()).keys() == {"version/a"}


def test_a_file_in_the_place_of_the_choices_is_removed(tmp_path, caplog):
    (tmp_path / FOLDER).write_text("a file")
    check_tuning(tmp_path)
    assert not (tmp_path / FOLDER).exists()
    assert "removed a file in the place of a folder" in caplog.text
