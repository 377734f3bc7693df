"""A loss of answers from outside: terms and metrics by name, with an advantage and a divisor of its own."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.data.batch import Rollouts
from jaxglue.objectives.advantages import Rewards, leave_one_out
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.policy_gradient import DAPO
from jaxglue.objectives.rollouts import Metric, RolloutObjective
from jaxglue.rl.advantages import compare


class Reinforce(RolloutObjective):
    """Log-probabilities weighted by advantages."""

    generations = 2

    def advantages(self, rewards):
        return leave_one_out(rewards.total)

    def loss_and_metrics(self, inputs):
        losses = -inputs.counted * inputs.advantages * inputs.log_probs
        good = inputs.counted * (inputs.advantages > 0)
        metrics = {"surprise": inputs.mean(-inputs.now), "length": inputs.mean_of_answers(inputs.lengths)}
        return losses, metrics | {"good/logp": Metric(good * inputs.now, good), "loss_again": Metric(losses)}


class Watched(DAPO):
    """DAPO with a metric of its own."""

    def policy_losses(self, inputs, ratio, correction):
        losses, metrics = super().policy_losses(inputs, ratio, correction)
        return losses, metrics | {"ratio/mean": inputs.mean(ratio)}


def micro_batch(seed: int):
    """Return values and a batch of two answers, of 3 and 2 tokens, in a row of 8, and the log-probabilities."""
    log_probs = jnp.asarray(-np.random.default_rng(seed).random((1, 8)), jnp.float32)
    owners = jnp.array([[2, 0, 0, 0, 2, 1, 1, 2]])
    rollouts = Rollouts(owners=owners, advantages=jnp.array([[2.0, -1.0]]), sampler=log_probs)
    values = SimpleNamespace(log_probs=log_probs, entropy=(jnp.float32(3), jnp.float32(5)))
    return values, SimpleNamespace(rollouts=rollouts, loss_weights=(owners < 2).astype(jnp.float32)), log_probs


def test_metrics_are_sums_over_micro_batches_by_their_divisors():
    objective = Reinforce(config=ObjectiveConfig(objective="grpo"))
    parts = [micro_batch(seed) for seed in range(2)]
    total = sum(objective(values, batch) for values, batch, _ in parts) / 4  # as a step with a normalizer of 4
    assert total.shape == objective.shape
    good, bad = (np.concatenate([p[0, own] for *_, p in parts]) for own in (slice(1, 4), slice(5, 7)))
    loss = -(2 * good.sum() - bad.sum()) / 4
    assert float(objective.loss(total)) == pytest.approx(loss)
    metrics = {name: float(value) for name, value in objective.metrics(total).items()}
    expected = {"surprise": -np.concatenate([good, bad]).mean(), "length": 2.5, "good/logp": good.mean()}
    assert metrics == pytest.approx(expected | {"loss_again": loss}, rel=1e-5)


def test_metrics_have_no_gradient_and_the_loss_has():
    objective, (values, batch, log_probs) = Reinforce(config=ObjectiveConfig(objective="grpo")), micro_batch(0)

    def sums(log_probs):
        return objective(SimpleNamespace(**{**vars(values), "log_probs": log_probs}), batch)

    gradients = jax.jacobian(sums)(log_probs)[:, 0]
    np.testing.assert_array_equal(gradients[0], [0, -2, -2, -2, 0, 1, 1, 0])
    np.testing.assert_array_equal(gradients[1:], np.zeros_like(gradients[1:]))


def test_advantages_are_the_objectives():
    rewards = Rewards(by_function=np.array([[[1.0], [0.0], [2.0]]]), weights=np.ones(1))
    advantages = compare(Reinforce(config=ObjectiveConfig(objective="grpo")), rewards)
    np.testing.assert_array_equal(advantages.values, [[0.0, -1.5, 1.5]])


def test_a_metric_joins_those_of_the_loss_that_is_extended():
    (values, batch, _), config = micro_batch(0), ObjectiveConfig(objective="dapo")
    both = [kind(config=config) for kind in (DAPO, Watched)]
    plain, watched = ({k: float(v) for k, v in each.metrics(each(values, batch)).items()} for each in both)
    assert watched == plain | {"ratio/mean": 1.0}
