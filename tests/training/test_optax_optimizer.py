"""Muon, Adafactor and Lion: optax's own updates, their state, sharding and refusals."""

import json
import math
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxglue.training.config import OptimizerConfig
from jaxglue.training.optimizer import make_optimizer, state_bytes
from jaxglue.training.step import train_step
from jaxglue.training.train import train
from tests.selection import repeats_parts_of

SHAPES = {
    "embed_tokens": {"weight": (256, 128)},
    "norm": {"weight": (128,)},
    "layers": [{"self_attn": {"q_proj": {"weight": (256, 128), "bias": (256,)}}, "norm": {"weight": (128,)}}] * 2,
}


def tree(seed):
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return treedef.unflatten([jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)])


def three_steps(config):
    optimizer, trainable = make_optimizer(config, total_steps=9), tree(0)
    state = optimizer.init(trainable)
    for step in range(3):
        trainable, state, _ = optimizer.update(trainable, state, tree(step + 1), step)
    return trainable, state


def optax_steps(transform):
    trainable = tree(0)
    state = transform.init(trainable)
    for step in range(3):
        updates, state = transform.update(tree(step + 1), state, trainable)
        trainable = optax.apply_updates(trainable, updates)
    return trainable


def test_gradients_are_clipped_over_the_whole_tree():
    """Their sizes differ between steps, as an update's sign does not depend on that of its own step."""
    config = OptimizerConfig(optimizer="lion", **(SETTINGS | {"clip_norm": 1.0}))
    optimizer, trainable = make_optimizer(config, total_steps=9), tree(0)
    clipped, expected = optax.chain(optax.clip_by_global_norm(1.0), WHOLE["lion"]), tree(0)
    state, start = optimizer.init(trainable), clipped.init(expected)
    for step, size in enumerate((10.0, 1e-3, 1.0, 1e-3)):
        gradients = jax.tree.map(lambda leaf, size=size: size * leaf, tree(step + 1))
        updates, start = clipped.update(gradients, start, expected)
        expected = optax.apply_updates(expected, updates)
        trainable, state, _ = optimizer.update(trainable, state, gradients, step)
    chex.assert_trees_all_close(trainable, expected, rtol=2e-5, atol=2e-6)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map_with_path(
        lambda path, leaf: "muon" if leaf.ndim == 2 and path[0].key == "layers" else "adam", params
    )


SETTINGS = {"learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0, "clip_norm": 0, "weight_decay": 0.1}
MUON = optax.contrib.muon(0.1, weight_decay=0.1, consistent_rms=0.2)
WHOLE = {
    "lion": optax.lion(0.1, weight_decay=0.1, mask=matrices),
    "adafactor": optax.adafactor(
        0.1, multiply_by_parameter_scale=False, weight_decay_rate=0.01, weight_decay_mask=matrices
    ),
    "muon": optax.partition({"muon": MUON, "adam": optax.adamw(0.1, weight_decay=0.1, mask=matrices)}, labels),
}


@pytest.mark.parametrize("name", WHOLE)
def test_updates_equal_those_of_optax_on_the_whole_tree(name):
    chex.assert_trees_all_close(
        three_steps(OptimizerConfig(optimizer=name, **SETTINGS))[0], optax_steps(WHOLE[name]), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize(
    ("name", "moments", "matrix", "rest"),
    [("lion", "float32", 4, 4), ("lion", "bfloat16", 2, 2), ("muon", "float32", 4, 8), ("muon", "bfloat16", 2, 6)],
)
def test_state_has_its_size(name, moments, matrix, rest):
    config = OptimizerConfig(optimizer=name, moments=moments)
    values = sum(leaf.size for leaf in jax.tree.leaves(tree(0)))
    hidden = 2 * 256 * 128
    expected = (hidden * matrix + (values - hidden) * rest) / values
    assert state_bytes(config, tree(0)) == pytest.approx(expected, rel=0.01)
    state = make_optimizer(config, 1).init(tree(0))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == round(state_bytes(config, tree(0)) * values)


def test_adafactor_stores_rows_and_columns_of_matrices():
    assert state_bytes(OptimizerConfig(optimizer="adafactor"), tree(0)) < 0.2


def test_shards_stay_where_they_are():
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    trainable = jax.device_put(tree(0), sharding)
    optimizer = make_optimizer(OptimizerConfig(optimizer="muon"), 9)
    state = jax.tree.map(
        lambda leaf: leaf if leaf.ndim == 0 else jax.device_put(leaf, sharding), optimizer.init(tree(0))
    )
    new, _, _ = optimizer.update(trainable, state, jax.device_put(tree(1), sharding), 0)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(new))


def test_unsuitable_moments_are_refused():
    for name in ("muon", "lion", "adafactor"):
        with pytest.raises(
            ValueError, match=r"moments: expected float32 \| bfloat16|--moments is for .*, not adafactor"
        ):
            OptimizerConfig(optimizer=name, moments="8bit")
    with pytest.raises(ValueError, match="are both given"):
        OptimizerConfig(optimizer="adamw_8bit", moments="bfloat16")


def test_muon_is_refused_for_adapters_and_experts(make_config, model_folder):
    with pytest.raises(ValueError, match="--optimizer muon orthogonalizes whole weight matrices, not adapters"):
        train(make_config(optimizer="muon"))
    path = model_folder / "config.json"
    moe = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path.write_text(json.dumps(json.loads(path.read_text()) | moe))
    with pytest.raises(ValueError, match=r"the experts of .* are stacked: choose adamw, lion or adafactor"):
        train(make_config(optimizer="muon", method="full"))


@repeats_parts_of("test_updates_equal_those_of_optax_on_the_whole_tree")
@pytest.mark.parametrize(("name", "update_in_backward"), [("muon", False), ("adafactor", True)])
def test_resumed_run_is_bit_identical(make_config, tmp_path, monkeypatch, name, update_in_backward):
    options = {"optimizer": name, "method": "full", "steps": 4, "learning_rate": 1e-3, "schedule": "wsd"}
    options |= {"clip_norm": 0, "update_in_backward": True} if update_in_backward else {}
    whole = train(make_config(**options, output=tmp_path / "whole"))

    def interrupted(*arguments):
        state, result = train_step(*arguments)
        if result.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return state, result

    with monkeypatch.context() as patch:
        patch.setattr("jaxglue.training.loop.train_step", interrupted)
        assert train(make_config(**options)) is None
    resumed = train(make_config(**options, resume=True))
    assert resumed.last_loss == whole.last_loss
    assert math.isfinite(whole.last_loss) and whole.last_loss < whole.first_loss
    assert np.isfinite(jnp.float32(resumed.last_loss))
