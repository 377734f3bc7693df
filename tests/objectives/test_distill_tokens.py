"""The expected gradient of distillation by sampled tokens is the reverse divergence's."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.data.batch import Rollouts
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.rollouts import LossInputs


class Values:
    def __init__(self, log_probs):
        self.log_probs, self.entropy = log_probs, (log_probs.sum(), log_probs.sum())


def test_its_expected_gradient_is_that_of_the_reverse_divergence():
    objective = ObjectiveConfig(objective="distill_tokens").make()
    rng = np.random.default_rng(0)
    logits, teacher = (jnp.array(rng.normal(size=7), jnp.float32) for _ in range(2))
    tokens, counted = jnp.arange(7)[None], jnp.array([[1.0] * 6 + [0.0]])

    def losses(logits):
        log_probs = jax.nn.log_softmax(logits)[tokens]
        reference = jax.nn.log_softmax(teacher)[tokens].at[0, 6].set(jnp.nan)
        rollouts = Rollouts(owners=jnp.zeros((1, 7), int), advantages=jnp.zeros((1, 1)), reference=reference)
        inputs = LossInputs(values=Values(log_probs), rollouts=rollouts, counted=counted)
        return objective.loss_and_metrics(inputs)[0]

    def divergence(logits):  # without the token that does not count
        own, other = jax.nn.log_softmax(logits)[:6], jax.nn.log_softmax(teacher)[:6]
        return (jnp.exp(own) * (own - other - 1)).sum()

    gradients = jax.jacobian(losses)(logits)[0]
    expected = jax.grad(divergence)(logits)
    np.testing.assert_allclose(jax.nn.softmax(logits) @ gradients, expected, atol=1e-6)
    assert (gradients[6] == 0).all()
