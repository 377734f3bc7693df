"""Page-locked buffers of the host."""

import os

import pytest

from jaxglue.engine.cuda_copies import local_cpus


@pytest.mark.parametrize("listed", ["0-3,8", "5", "", None, "no list"])
def test_memory_is_taken_beside_the_gpu(tmp_path, monkeypatch, listed):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 8})
    if listed is not None:
        (tmp_path / "local_cpulist").write_text(f"{listed}\n")
    assert local_cpus(tmp_path) == {"0-3,8": {1, 2, 8}, "5": {5}}.get(listed or "", {1, 2, 5, 8})
