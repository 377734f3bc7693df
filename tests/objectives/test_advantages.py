"""Advantages where some answers have no reward, and metrics of TRL's names that differ from TRL's on purpose."""

import numpy as np
import pytest

from jaxglue.objectives.advantages import Rewards, leave_one_out
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.rl.advantages import compare

NONE = np.nan


def rewards(*groups) -> Rewards:
    return Rewards(by_function=np.array(groups)[..., None], weights=np.ones(1))


def test_the_baseline_is_the_mean_of_the_other_answers_with_a_reward():
    values = leave_one_out(np.array([[3.0, 1.0, 0.0], [3.0, NONE, 1.0], [5.0, NONE, NONE], [NONE, NONE, NONE]]))
    expected = [[2.5, -0.5, -2.0], [2.0, NONE, -2.0], [NONE, NONE, NONE], [NONE, NONE, NONE]]
    np.testing.assert_array_equal(values, expected)


def test_a_lone_reward_teaches_nothing():
    """An answer without others to compare it with has no baseline; its reward is no advantage."""
    advantages = compare(ObjectiveConfig(objective="rloo").make(), rewards([5.0, NONE], [2.0, 1.0]))
    np.testing.assert_array_equal(advantages.values, [[0, 0], [1, -1]])
    assert advantages.teaches.tolist() == [False, True]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_of_equal_rewards_are_counted_whatever_scales_the_advantages(scale):
    """TRL counts batches whose deviation is 0 where the batch's scales; what teaches nothing is a group."""
    objective = ObjectiveConfig(objective="grpo", scale_rewards=scale).make()
    assert compare(objective, rewards([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0])).is_equal.mean() == 0.5
