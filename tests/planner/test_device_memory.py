"""JAX's pool of a GPU's memory within a limit of the process."""

import jax
import pytest

from jaxglue.planner import calibration as fitted
from jaxglue.planner import device_memory
from jaxglue.planner.device_memory import (
    POOL_SHARE,
    bound_pool,
    bounded_pool,
    largest_share,
    leave_small_blocks,
    pool_gib,
    total_memory,
)
from jaxglue.planner.gpus import GIB

OLD = "XLA_PYTHON_CLIENT_MEM_FRACTION"
OUTSIDE = fitted.OUTSIDE_POOL / GIB


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(device_memory, "total_memory", lambda: 80 * GIB)


@pytest.mark.parametrize(("limit", "pool"), [(None, None), (20.0, 20 - OUTSIDE), (0.5, 0.25)])
def test_a_limit_counts_what_lies_outside_of_the_pool(limit, pool):
    assert pool_gib(limit) == pool


@pytest.mark.parametrize(
    ("limit", "before", "name", "share"),
    [
        (40.0, {}, OLD, (40 - OUTSIDE) / 80),
        (40.0, {OLD: "0.9"}, OLD, (40 - OUTSIDE) / 80),
        (40.0, {POOL_SHARE: "0.2"}, POOL_SHARE, 0.2),
        (90.0, {}, OLD, 0.75),
    ],
)
def test_the_pool_ends_at_the_limit_unless_it_ends_before(gpu, limit, before, name, share):
    environ = dict(before)
    bound_pool(limit, environ)
    assert environ.keys() == {name} and float(environ[name]) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(("gib", "share"), [(80, 0.9), (12, 1 - (OUTSIDE + 1) / 12)])
def test_exchanging_gpus_keep_as_much_of_the_pool_as_nccl_leaves(monkeypatch, gib, share):
    monkeypatch.setattr(device_memory, "total_memory", lambda: gib * GIB)
    assert largest_share(exchanges=False) == 0.9
    assert largest_share(exchanges=True) == pytest.approx(share)
    assert pool_gib(40.0, exchanges=True) == pytest.approx(39 - OUTSIDE)


@pytest.mark.parametrize("before", [{}, {OLD: "0.9"}])
def test_a_run_leaves_the_next_one_its_own_limit(gpu, before):
    environ = dict(before)
    with bounded_pool(40.0, environ):
        assert float(environ[OLD]) < 0.5
    assert environ == before


def test_the_pool_is_left_alone_without_a_limit_or_a_gpu(gpu, monkeypatch):
    environ: dict[str, str] = {}
    bound_pool(None, environ)
    monkeypatch.setattr(device_memory, "total_memory", lambda: None)
    bound_pool(40.0, environ)
    assert not environ and total_memory() is None


def test_every_other_small_block_is_free():
    before = {id(array) for array in jax.live_arrays()}
    held = leave_small_blocks(jax.local_devices()[:1])
    live = [array for array in jax.live_arrays() if id(array) not in before]
    assert len(live) == len(held) == 64 and all(array.nbytes == 2**16 for array in held)
