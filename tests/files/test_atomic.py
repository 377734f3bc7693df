"""Files written by rename: simultaneous writers, killed ones, and failures."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxglue.files.atomic import atomic_file, temporary_prefix


def test_simultaneous_writers_all_succeed(tmp_path):
    path = tmp_path / "shared"

    def write(writer):
        with atomic_file(path) as temporary:
            temporary.write_text(f"{writer}" * 10_000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(200)))
    assert path.read_text() in {f"{writer}" * 10_000 for writer in range(200)}
    assert [*tmp_path.iterdir()] == [path]


def test_a_failure_leaves_the_previous_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]


def test_leftovers_of_killed_writers_alone_are_removed(tmp_path):
    path = tmp_path / "file"
    dead = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)
    killed, alive = (tmp_path / f"{temporary_prefix(path)}{process}.ab.tmp" for process in (dead, 1))
    other = tmp_path / ".file.tmp"
    for entry in (killed, alive, other):
        entry.touch()
    with atomic_file(path) as temporary:
        temporary.touch()
    assert sorted(tmp_path.iterdir()) == sorted([path, alive, other])
