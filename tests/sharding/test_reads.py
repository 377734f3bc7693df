"""Decisions and embeddings on a mesh: loss and gradients equal those of one device."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from read_units import read_dataset
from selection import repeat

from jaxglue.data.iterator import BatchIterator
from jaxglue.data.questions import Labels
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.parameters import split_model
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.sharding.mesh import place_batch
from jaxglue.sharding.rules import Layout
from jaxglue.training.step import with_gradients

CONFIG = {
    "model_type": "qwen3", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip
NAMED = {"noul": ((1,), (2,)), "choice": ((3,), (4,), (5,)), "score": ((6,), (7,))}
LABELS = Labels({kind: ("",) * len(groups) for kind, groups in NAMED.items()}, NAMED)


def units(objective):
    rng = np.random.default_rng(0)

    def tokens():
        return rng.integers(8, 104, rng.integers(2, 6)).tolist()

    if objective == "embed":
        return [([], [(tokens(), kind, [1.0]) for kind in (0, 1, 2)]) for _ in range(12)]
    return [(tokens(), [(tokens(), int(k), [0.3, 0.7]) for k in rng.integers(0, 3, 3)]) for _ in range(12)]


@pytest.mark.parametrize("objective", [repeat("decide"), "embed"])
def test_loss_and_gradients_equal_those_of_one_device(mesh_of, objective):
    settings = ObjectiveConfig(objective=objective)
    model = build_model(config_from_hf(CONFIG), dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdefs, *trees = split_model(model, nnx.Param)
    dataset = read_dataset(units(objective), settings.task(shared_prompt=True), LABELS, seq_len=32)
    found = {}
    for name, mesh in (("one", None), ("several", mesh_of("data=2,fsdp=4"))):
        layout = Layout(mesh, jnp.float32)
        shardings = [layout.shardings(layout.param_specs(tree)) for tree in trees]
        trainable, frozen = trees if mesh is None else map(jax.device_put, trees, shardings)
        batches = BatchIterator(dataset, seq_len=32, batch_size=8, documents_per_step=12, epochs=1)
        executor = Executor(
            graphdefs,
            model.config,
            policy=parse_policy("dots"),
            dtype=jnp.float32,
            objective=settings.make(),
            mesh=mesh,
        )
        parts = SimpleNamespace(
            run=SimpleNamespace(objective=settings.make(), batches=batches),
            place=lambda step, mesh=mesh: place_batch(step.micro_batches, mesh),
            executor=executor,
            first_pass=None,
            layout=layout,
        )
        step = next(batches)
        if objective == "embed":
            step = with_gradients(parts, SimpleNamespace(trainable=trainable, frozen=frozen), step)
            placed = step.micro_batches
        else:
            placed = place_batch(step.micro_batches, mesh)
        found[name] = jax.device_get(executor.loss_and_gradients(trainable, frozen, placed, float(step.targets)))
    np.testing.assert_allclose(found["several"][0], found["one"][0], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(found[name][1]) for name in ("several", "one")), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)
