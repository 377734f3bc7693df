"""Advantages of answers from their rewards, as TRL computes them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Values = Float[np.ndarray, "prompts answers"]
"""A number for each answer; NaN where it has none."""
EPSILON = 1e-4
"""Added to standard deviations by which rewards are divided."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Rewards of answers, with everything else that advantages are made of."""

    by_function: Float[np.ndarray, "prompts answers functions"]
    """NaN where a function left an answer out."""
    weights: Float[np.ndarray, " functions"]
    divergence: Values | float = 0.0
    """Σ log π − log π_ref over an answer's tokens, in nats; 0 without a reference."""

    @property
    def total(self) -> Values:
        """Return the weighted sums of the rewards that there are; NaN for answers without any."""
        return weighted(self.by_function, self.weights)


def group_relative(rewards: Rewards, *, scale: str = "group", aggregation: str = "sum_then_normalize") -> Values:
    """Return rewards less their group's mean, over a standard deviation.

    Args:
        rewards: of the answers.
        scale: the deviation is of the rewards of the group, or of the whole batch; none divides by nothing.
        aggregation: normalize_then_sum normalizes each function's rewards in their group, and their weighted sum over
            the batch, whatever the scale.
    """
    if aggregation == "normalize_then_sum":
        each = rewards.by_function
        summed = weighted((each - mean(each, 1)) / (deviation(each, 1) + EPSILON), rewards.weights)
        return (summed - mean(summed)) / (deviation(summed) + EPSILON)
    total = rewards.total
    values = total - mean(total, 1)
    if scale != "none":
        values /= deviation(total, 1 if scale == "group" else None) + EPSILON
    return values


def leave_one_out(rewards: Values) -> Values:
    """Return rewards less the mean of the other answers' to the prompt; NaN where no other one has a reward."""
    scorable = (~np.isnan(rewards)).sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        others = (np.nansum(rewards, 1, keepdims=True) - rewards) / (scorable - 1)
    return rewards - np.where(scorable > 1, others, np.nan)


def weighted(
    rewards: Float[np.ndarray, "prompts answers functions"], weights: Float[np.ndarray, " functions"]
) -> Values:
    """Return weighted sums without the rewards that are NaN; NaN where all are."""
    return np.where(np.isnan(rewards).all(-1), np.nan, np.nansum(rewards * weights, -1))


def mean(values: Float[np.ndarray, "..."], axis: int | None = None) -> Float[np.ndarray, "..."]:
    """Return the mean of values that are not NaN, NaN where there is none; the axis is kept."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    return np.where(count > 0, np.nansum(values, axis, keepdims=True) / np.maximum(count, 1), np.nan)


def deviation(values: Float[np.ndarray, "..."], axis: int | None = None) -> Float[np.ndarray, "..."]:
    """Return the standard deviation, with n − 1, of values that are not NaN; NaN where there are fewer than two."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum((values - mean(values, axis)) ** 2, axis, keepdims=True)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)
