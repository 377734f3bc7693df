"""Page-locked buffers of the host."""

import os

import chex
import jax
import pytest

from jaxglue.engine import transfer
from jaxglue.engine.host_buffers import HostBuffers, MeshBuffers, local_cpus
from jaxglue.sharding.mesh import MeshShape, batch_sharding, make_mesh


@pytest.mark.parametrize("listed", ["0-3,8", "5", "", None, "no list"])
def test_memory_is_taken_beside_the_gpu(tmp_path, monkeypatch, listed):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 8})
    if listed is not None:
        (tmp_path / "local_cpulist").write_text(f"{listed}\n")
    assert local_cpus(tmp_path) == {"0-3,8": {1, 2, 8}, "5": {5}}.get(listed or "", {1, 2, 5, 8})


@pytest.mark.gpu
def test_values_come_back_from_the_host_as_they_left():
    values = [jax.random.bits(jax.random.key(seed), (2**20 + seed,)) for seed in range(8)]
    with HostBuffers(jax.local_devices()[0], 2**23) as buffers:
        buffers.prepare(value.nbytes for value in values[:4])
        for _ in range(2):
            chex.assert_trees_all_equal(transfer.to_device(transfer.to_host(values, buffers)), values)


@pytest.mark.gpu
@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two GPUs")
def test_parts_on_several_gpus_come_back_as_they_left():
    count = jax.local_device_count()
    sharding = batch_sharding(make_mesh(MeshShape(data=count)))
    values = [jax.device_put(jax.random.bits(jax.random.key(n), (count, 2**20 + n)), sharding) for n in range(8)]
    with MeshBuffers(jax.local_devices(), 2**23) as buffers:
        buffers.prepare(value.nbytes // count for value in values[:4])
        for _ in range(2):
            moved = transfer.to_device(transfer.to_host(values, buffers))
            chex.assert_trees_all_equal(moved, values)
            assert [value.sharding for value in moved] == [value.sharding for value in values]
