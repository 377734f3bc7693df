"""The remat policy of a run, as it is planned for a GPU."""

import jax
import pytest

from jaxglue.models import config_from_hf
from jaxglue.planner.gpus import find_gpu
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training import remat
from jaxglue.training.workload import KnownRows, make_workload


@pytest.fixture
def choose(make_config, tiny_config, monkeypatch):
    """Return the choice of a run with these settings on an H200."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(remat, "device_gpu", lambda *_: find_gpu("H200"))

    def choice(**settings):
        config, model = make_config(**settings), config_from_hf({**tiny_config, "model_type": "qwen3"})
        return remat.choose_remat(remat.Asked.of(config), make_workload(config, model, (64,), MeshShape()))

    return choice


def test_the_plan_says_that_small_values_stay_on_the_gpu(choose):
    offload, streamed = (choose(remat="offload", weights=where) for where in ("device", "host"))
    assert offload.remat == "full" and offload.offloaded_bytes == 0
    assert "in place of offload: up to 4 MiB of a layer stay on the GPU" in str(offload)
    assert streamed.remat == "offload" and "in place of" not in str(streamed)
    assert "in place of" not in str(choose(remat="dots"))


def test_programs_are_compiled_ahead_where_the_first_batch_tells_their_shapes(make_config, tiny_config):
    model = config_from_hf({**tiny_config, "model_type": "qwen3"})

    def ahead(mesh="data=1", has_data=True, **settings):
        config = make_config(batch_size=8, **settings)
        return make_workload(config, model, (64,), MeshShape.parse(mesh), KnownRows(has_data=has_data)).compiled_ahead

    assert ahead() and ahead("data=2,tensor=2")
    assert not ahead("fsdp=2") and not ahead("context=2")
    assert not ahead(has_data=False) and not ahead(streaming=True, steps=3)
    assert not ahead(objective="dpo") and not ahead(objective="grpo", reward=("exact",))
    assert not ahead(embeddings="host")
