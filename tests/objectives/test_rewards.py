"""Rewards and log-probabilities that runs report, against values computed by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.objectives import kto
from jaxglue.objectives.config import ObjectiveConfig

PAIRS = SimpleNamespace(
    chosen=jnp.array([-3.0, -8.0]),
    rejected=jnp.array([-4.0, -2.0]),
    chosen_mean=jnp.array([-0.5, -2.0]),
    rejected_mean=jnp.array([-1.0, -0.25]),
    chosen_ratio=jnp.array([2.0, -1.0]),
    rejected_ratio=jnp.array([1.0, 3.0]),
)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_rewards_of_pairs_are_beta_times_their_log_ratios(name):
    found = ObjectiveConfig(objective=name, beta=0.5).make().measures(PAIRS)
    assert {key: values.tolist() for key, values in found.items()} == {
        "rewards/chosen": [1.0, -0.5],
        "rewards/rejected": [0.5, 1.5],
        "rewards/accuracies": [1.0, 0.0],
        "rewards/margins": [0.5, -2.0],
        "logps/chosen": [-3.0, -8.0],
        "logps/rejected": [-4.0, -2.0],
    }


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_rewards_without_a_reference_are_beta_times_the_mean_of_tokens(name):
    found = ObjectiveConfig(objective=name, beta=0.5).make().measures(PAIRS)
    assert found["rewards/chosen"].tolist() == [-0.25, -1.0] and found["rewards/rejected"].tolist() == [-0.5, -0.125]
    assert found["rewards/margins"].tolist() == [0.25, -0.875] and found["rewards/accuracies"].tolist() == [1.0, 0.0]


def test_ktos_rewards_are_beta_times_the_log_ratios_of_good_and_of_bad_answers(monkeypatch):
    monkeypatch.setattr(kto, "sum_parts", lambda log_probs, answers: log_probs)
    sums = jnp.array([[[-3.0, -5.0], [-4.0, -6.0], [-2.0, -1.0]]])  # the judged answer, and the unrelated one
    reference = jnp.array([[[-5.0, -6.0], [-5.0, -8.0], [-3.0, -1.0]]])
    answers = SimpleNamespace(desirable=jnp.array([[1.0, 0.0, 1.0]]), used=jnp.ones((1, 3)), reference=reference)
    objective = ObjectiveConfig(objective="kto", beta=0.5).make()
    losses, parts = objective.units(SimpleNamespace(log_probs=sums), None, answers)
    found = objective.metrics(jnp.stack([losses, *parts], axis=-1).reshape(3, -1).mean(0))
    kl = 1.0  # (1 + 2 + 0) / 3
    sigmoid = 1 / (1 + np.exp(-0.5 * (np.array([2.0, 1.0, 1.0]) - kl)))
    expected = {
        "loss": np.mean([1 - sigmoid[0], sigmoid[1], 1 - sigmoid[2]]),
        "rewards/chosen": 0.75,
        "rewards/rejected": 0.5,
        "rewards/margins": 0.25,
        "logps/chosen": -2.5,
        "logps/rejected": -4.0,
        "kl": kl,
    }
    assert {name: pytest.approx(float(found[name]), abs=1e-6) for name in expected if name in found} == {
        name: expected[name] for name in expected if name in found
    }
    assert expected.keys() - found.keys() <= {"loss"}
    np.testing.assert_allclose(losses.mean(), expected["loss"], rtol=1e-6)
