"""The optimiser, part by part, is optax's AdamW on the whole tree."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxglue.training.optimizer import Optimizer, OptimizerConfig, learning_rate_schedule


def random_tree(seed, layers=10):
    rng = np.random.default_rng(seed)

    def part():
        return {"proj": {"lora_A": jnp.asarray(rng.normal(size=(2, 5)))}, "norm": jnp.asarray(rng.normal(size=5))}

    return {"embed_tokens": part(), "norm": {}, "layers": [{} if i == 3 else part() for i in range(layers)]}


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_updates_equal_adamw_on_the_whole_tree(clip_norm):
    config = OptimizerConfig(clip_norm=clip_norm, weight_decay=0.1, learning_rate=0.01, warmup_ratio=0.5)
    optimizer, trainable = Optimizer(config, total_steps=4), random_tree(0)
    whole = optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.adamw(
            learning_rate_schedule(config, 4),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=0.1,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        ),
    )
    expected = jax.tree.map(jnp.copy, trainable)
    state, expected_state = optimizer.init(trainable), whole.init(expected)
    for step in range(3):
        gradients = random_tree(step + 1)
        norm = optax.tree.norm(gradients)
        changes, expected_state = whole.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, changes)
        trainable, state, values = optimizer.update(trainable, state, gradients, step)
        chex.assert_trees_all_close(trainable, expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(values["grad_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(values["learning_rate"], learning_rate_schedule(config, 4)(step), rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "last"), [("constant", 1.0), ("linear", 0.1 + 0.9 / 90), ("cosine", 0.1 + 0.9 * 0.000305)]
)
def test_schedules_rise_from_the_first_step_and_end_where_they_should(schedule, last):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [float(learning_rate_schedule(config, 100)(step)) for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[-1], last, rtol=1e-3)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="learning_rate=0 must be positive"):
        OptimizerConfig(learning_rate=0)
    with pytest.raises(ValueError, match=r"beta2=1\.5 must be between 0 and 1"):
        OptimizerConfig(beta2=1.5)
    with pytest.raises(ValueError, match="--update-in-backward needs --clip-norm 0"):
        OptimizerConfig(update_in_backward=True)
