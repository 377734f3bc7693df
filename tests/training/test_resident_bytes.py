"""Bytes shown by the plan are the bytes allocated on each device; `test_simulated_devices.py` runs those of meshes."""

import json
import re
from collections import Counter

import jax
import pytest

from jaxglue.planner.memory import resident_bytes
from jaxglue.sharding import plan
from jaxglue.sharding.mesh import MeshShape, make_mesh
from jaxglue.sharding.rules import Layout
from jaxglue.training import report
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.setup import resolve
from jaxglue.training.weights import build_parameters


@pytest.fixture
def setup_of(make_config, model_folder):
    """setup_of(mesh, **fields) → the set-up in bfloat16 of a model whose matrices blocks and devices divide."""
    path = model_folder / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "tie_word_embeddings": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))

    def make(mesh: str, **fields):
        if MeshShape.parse(mesh).devices != jax.device_count():
            pytest.skip(f"needs the devices of {mesh}")
        return resolve(make_config(mesh=mesh, batch_size=8, dtype="bfloat16", **fields))

    return make


def allocate(setup):
    """Build (trainable, frozen, optimizer state) as the trainer does."""
    layout = Layout(make_mesh(setup.mesh) if setup.mesh.devices > 1 else None, setup.workload.dtype)
    _, trainable, frozen = build_parameters(setup, layout)
    return (
        trainable,
        frozen,
        AdamWOptimizer(setup.schedule.optimizer, setup.schedule.total_steps, layout).init(trainable),
    )


def device_bytes(tree) -> set[int]:
    """Return the bytes of a tree's arrays on each device, as a set."""
    counts = Counter({device.id: 0 for device in jax.devices()})
    for leaf in jax.tree.leaves(tree):
        counts.update({shard.device.id: shard.data.nbytes for shard in leaf.addressable_shards})
    return set(counts.values())


@pytest.mark.parametrize("mesh", ["data=1", "data=8", "data=2,fsdp=4"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"method": "full"},
        {"method": "full", "moments": "bfloat16"},
        {"quantize": "nf4"},
        {"quantize": "nf4", "dora": True, "modules_to_save": ("embed_tokens", "lm_head")},
        {"trainable_token_indices": (3, 7)},
    ],
    ids=["lora", "full", "full-bfloat16-moments", "nf4", "dora-embeddings", "rows"],
)
def test_planned_bytes_are_allocated(setup_of, mesh, fields):
    setup = setup_of(mesh, **fields)
    trainable, frozen, state = map(device_bytes, allocate(setup))
    planned = resident_bytes(setup.workload)
    assert (trainable, frozen, state) == ({planned.trainable}, {planned.frozen()}, {planned.moments})


def test_panel_shows_bytes_of_full_fine_tuning(setup_of, monkeypatch):
    monkeypatch.setattr(report, "GIB", 1)
    monkeypatch.setattr(plan, "_GIB", 1)
    setup = setup_of("fsdp=8", method="full")
    trainable, _, state = (min(device_bytes(tree)) for tree in allocate(setup))
    rows = report.plan_rows(setup)
    gradients = trainable
    assert rows["memory"].startswith(f"{trainable + gradients + state:.2f} GiB for weights, gradients and optimizer")
    shares = re.findall(r"([\d.]+) GiB (?:whole|split)", str(rows["mesh"]))
    assert sum(map(float, shares)) == trainable
