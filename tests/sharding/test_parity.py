"""Loss and gradients on a mesh are those of one device, whatever is split."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxglue.lora import LoraConfig, add_lora
from jaxglue.memory.executor import Executor
from jaxglue.memory.policy import parse_policy
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.context import RouterLosses
from jaxglue.parameters import split_model
from jaxglue.sharding.layout import Layout
from jaxglue.sharding.mesh import batch_sharding

LENGTHS = [[3, 2], [9], [1, 1, 5], [10], [2], [4, 3], [7, 1], [1]]
"""Rows of very different numbers of target tokens."""
CONFIG = {
    "model_type": "qwen3", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip


MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}


@cache
def parts(kind: str, **changes):
    config = config_from_hf(CONFIG | changes)
    model = build_model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    if kind == "lora":
        add_lora(model, LoraConfig(rank=4), rngs=nnx.Rngs(1))
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
            if path[-1] == "lora_B":  # zero at the start: the gradient to A would vanish
                variable.set_value(jax.random.normal(jax.random.key(len(path)), variable.shape) * 0.1)
    return config, *split_model(model, nnx.LoRAParam if kind == "lora" else nnx.Param)


@pytest.fixture(scope="session")
def batches(random_batch):
    return [random_batch(lengths, 12, seed=seed) for seed, lengths in enumerate((LENGTHS, LENGTHS[::-1]))]


@cache
def _expected(kind: str, batches, changes):
    config, structure, trainable, frozen = parts(kind, **dict(changes))
    executor = Executor(structure, config, policy=parse_policy("dots"), **OPTIONS)
    return executor.loss_and_gradients(trainable, frozen, batches, _weight(batches))


def _weight(batches) -> float:
    return float(sum(batch.loss_weights.sum() for batch in batches))


class _Batches(tuple):
    __slots__ = ()
    __hash__ = object.__hash__


OPTIONS = {"dtype": jnp.float32, "router_losses": RouterLosses(balance=0.1, z=0.1)}
TIED = {"tie_word_embeddings": True}
CASES = [
    ("lora", "data=8", "dots", {}),
    ("lora", "fsdp=8", "offload", {}),
    ("lora", "data=2,fsdp=2,tensor=2", "dots", {}),
    ("full", "data=2,fsdp=4", "full", TIED),
    ("full", "fsdp=4,tensor=2", "dots", TIED),
    ("lora", "data=2,expert=4", "dots", MOE),
    ("full", "fsdp=4,expert=2", "full", GPT_OSS),
]


@pytest.mark.parametrize(("kind", "mesh", "policy", "changes"), CASES)
def test_loss_and_gradients_are_those_of_one_device(mesh_of, batches, kind, mesh, policy, changes):
    mesh = mesh_of(mesh)
    config, structure, *trees = parts(kind, **changes)
    layout = Layout(mesh)
    trainable, frozen = (jax.device_put(tree, layout.shardings(layout.stored(tree))) for tree in trees)
    executor = Executor(structure, config, policy=parse_policy(policy), mesh=mesh, **OPTIONS)
    placed = jax.device_put(batches, batch_sharding(mesh))
    got = executor.loss_and_gradients(trainable, frozen, placed, _weight(batches))
    expected = _expected(kind, _Batches(batches), tuple(changes.items()))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(expected), rtol=1e-5, atol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.sharding, got[1]) == jax.tree.map(lambda leaf: leaf.sharding, trainable)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(got[1]["layers"])) > 1e-4
    compiled = executor.compilations()
    executor.loss_and_gradients(trainable, frozen, placed, _weight(batches))
    assert executor.compilations() == compiled
