"""Starts of JAX in runs and sessions."""

from jaxglue.planner import device_memory
from jaxglue.planner.device_memory import POOL_SHARE
from jaxglue.training import memory
from jaxglue.training.memory import configured_jax


def test_jax_starts_with_the_pool_and_the_programs_of_the_settings(make_config, tmp_path, monkeypatch):
    kept, environ = [], {"XLA_FLAGS": "--xla_a=1", POOL_SHARE: "0.9"}
    monkeypatch.setattr(memory, "keep_programs", lambda folder, take_turns: kept.append((folder, take_turns)))
    monkeypatch.setattr(memory.os, "environ", environ)
    monkeypatch.setattr(device_memory, "total_memory", lambda: 80 * 2**30)
    for processes in (1, 2):
        with configured_jax(tmp_path, 40.0, processes=processes):
            assert float(environ[POOL_SHARE]) < 0.5 and environ["XLA_FLAGS"].startswith("--xla_a=1 --xla_")
        assert environ[POOL_SHARE] == "0.9"
    assert kept == [(tmp_path, True), (tmp_path, False)]
    with configured_jax(None, None):
        assert len(kept) == 2
