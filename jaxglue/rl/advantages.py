"""Advantages of a generation's answers: what the objective makes of their rewards."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from jaxglue.objectives.advantages import Rewards, Values, deviation
from jaxglue.objectives.rollouts import RolloutObjective

_ROUNDING = 1e-8
"""Difference of advantages that is none."""


class Advantages(NamedTuple):
    """Advantages, and what metrics need to know."""

    values: Values
    """0 for answers without a reward."""
    rewards: Values
    """Weighted sums; NaN for answers without a reward."""
    is_equal: Bool[np.ndarray, " prompts"]
    """True for prompts whose answers all have the same reward, which teach nothing."""

    @property
    def teaches(self) -> Bool[np.ndarray, " prompts"]:
        """Return for each prompt whether some answer is better than another; none is without rewards.

        Advantages of equal rewards are 0 but for the rounding of their mean.
        """
        judged = ~np.isnan(self.rewards)
        most = self.values.max(axis=1, where=judged, initial=-np.inf)
        least = self.values.min(axis=1, where=judged, initial=np.inf)
        return most - least > _ROUNDING


def compare(objective: RolloutObjective, rewards: Rewards) -> Advantages:
    """Return the objective's advantages of answers with these rewards."""
    is_equal = np.isclose(deviation(objective.reward(rewards), 1)[:, 0], 0)
    return Advantages(np.nan_to_num(objective.advantages(rewards)), rewards.total, is_equal)
