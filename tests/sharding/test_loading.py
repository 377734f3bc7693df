"""Weights load from a folder straight into their shards; every row is read once."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxglue.engine import array_checks
from jaxglue.hf.export import save_model
from jaxglue.hf.loading import load_model, random_model
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.sharding.rules import Layout


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_every_row_is_read_once(mesh_of, tiny_config, tmp_path, monkeypatch, mesh):
    raw = {**tiny_config, "model_type": "qwen3", "vocab_size": 104}
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(raw))
    wanted = flatten_names(split_model(random_model(config_from_hf(raw), dtype=jnp.float32), nnx.Param)[1])
    save_model(tmp_path / "model", wanted, tmp_path / "base")
    rows, read_rows = Counter(), TensorFiles.read_rows

    def counted(self, name, start, stop):
        rows.update((name, row) for row in range(start, stop))
        return read_rows(self, name, start, stop)

    monkeypatch.setattr(TensorFiles, "read_rows", counted)
    monkeypatch.setattr(TensorFiles, "read", None)
    layout = Layout(mesh_of(mesh))
    got = flatten_names(
        split_model(load_model(tmp_path / "model", dtype=jnp.float32, place=layout.place), nnx.Param)[1]
    )
    assert rows == Counter((name, row) for name, tensor in wanted.items() for row in range(tensor.shape[0]))
    for name, tensor in got.items():
        np.testing.assert_array_equal(tensor, jax.device_get(wanted[name]), err_msg=name)
        assert tensor.sharding == layout.place(name, tensor)


def test_digests_of_shards_are_those_of_whole_arrays_and_summed_in_turn(mesh_of, monkeypatch):
    arrays, rows, check = [jnp.arange(2.0**20).reshape(1024, -1) + i for i in range(4)], [], array_checks._check
    expected = array_checks.check_arrays(arrays)
    layout = NamedSharding(mesh_of("fsdp=8"), PartitionSpec("fsdp"))

    def alone(array):
        assert all(row.is_ready() for row in rows)  # sums under way on all devices may wait for each other forever
        rows.append(check(array))
        return rows[-1]

    monkeypatch.setattr(array_checks, "_check", alone)
    assert array_checks.check_arrays(jax.device_put(arrays, layout)) == expected
