"""Advantages of answers from their rewards, as TRL computes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxglue.objectives.config import GroupSettings, RLOOSettings

Rewards = Float[np.ndarray, "prompts answers functions"]
"""NaN where a function left an answer out."""
Values = Float[np.ndarray, "prompts answers"]
_EPSILON = 1e-4
"""Added to standard deviations."""
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
        known: Any = {"axis": 1, "where": ~np.isnan(self.rewards)}
        return self.values.max(**known, initial=-np.inf) - self.values.min(**known, initial=np.inf) > _ROUNDING


def group_advantages(rewards: Rewards, weights: Float[np.ndarray, " functions"], config: GroupSettings) -> Advantages:
    """Return advantages relative to the other answers of a prompt."""
    total = _weighted(rewards, weights)
    deviations = _deviation(total, 1)
    if config.multi_objective_aggregation == "normalize_then_sum":
        scaled = (rewards - _mean(rewards, 1)) / (_deviation(rewards, 1) + _EPSILON)
        summed = _weighted(scaled, weights)
        values = (summed - _mean(summed)) / (_deviation(summed) + _EPSILON)
    else:
        values = total - _mean(total, 1)
        if config.scale_rewards != "none":
            values /= (deviations if config.scale_rewards == "group" else _deviation(total)) + _EPSILON
    return Advantages(np.nan_to_num(values), total, np.isclose(deviations[:, 0], 0))


def left_one_out(
    rewards: Rewards, weights: Float[np.ndarray, " functions"], divergence: Values, config: RLOOSettings
) -> Advantages:
    """Return the rewards, less β times the divergences from the reference, relative to the mean of the others."""
    total = _weighted(rewards, weights)
    penalized = total - config.beta * divergence
    scorable = (~np.isnan(penalized)).sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        others = (np.nansum(penalized, 1, keepdims=True) - penalized) / (scorable - 1)
    values = penalized - np.where(scorable > 1, others, np.nan)
    if config.normalize_advantages:
        values = (values - _mean(values)) / (_deviation(values) + _EPSILON)
    return Advantages(np.nan_to_num(values), total, np.isclose(_deviation(penalized, 1)[:, 0], 0))


def reward_metrics(rewards: Rewards, names: Sequence[str], advantages: Advantages) -> dict[str, float]:
    """Return the metrics of rewards by TRL's names; those of a function without any reward are left out."""
    metrics: dict[str, float] = {}
    for name, values in zip(names, np.moveaxis(rewards, -1, 0), strict=True):
        metrics |= {f"rewards/{name}/mean": _mean(values).item(), f"rewards/{name}/std": _deviation(values).item()}
    total = advantages.rewards
    metrics |= {"reward": _mean(total).item(), "reward_std": _deviation(total).item()}
    return {name: value for name, value in metrics.items() if not np.isnan(value)} | {
        "frac_reward_zero_std": float(advantages.is_equal.mean())
    }


def _weighted(rewards: Rewards, weights: Float[np.ndarray, " functions"]) -> Values:
    """Sum weighted rewards, without those left out; NaN where all are."""
    return np.where(np.isnan(rewards).all(-1), np.nan, np.nansum(rewards * weights, -1))


def _mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the mean of values that are not NaN, NaN where there is none; the axis is kept."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    return np.where(count > 0, np.nansum(values, axis, keepdims=True) / np.maximum(count, 1), np.nan)


def _deviation(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the standard deviation, with n − 1, of values that are not NaN; NaN where there are fewer than two."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum((values - _mean(values, axis)) ** 2, axis, keepdims=True)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)
