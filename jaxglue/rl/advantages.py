"""Advantages of a generation's answers, which the objective makes of their rewards, and metrics of both."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxglue.objectives.advantages import Rewards, Values, deviation, mean
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.rl.plan import RolloutPlan
from jaxglue.rl.record import Generation
from jaxglue.rl.sampler import Sample

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


def rewards_of(plan: RolloutPlan, generation: Generation) -> Rewards:
    """Return what is known of the answers when they are compared."""
    divergence = np.array([[sample.divergence for sample in group] for group in generation.samples])
    return Rewards(by_function=generation.rewards, weights=plan.judge.weights, divergence=divergence)


def compare(objective: RolloutObjective, rewards: Rewards) -> Advantages:
    """Return the objective's advantages of answers with these rewards."""
    is_equal = np.isclose(deviation(objective.reward(rewards), 1)[:, 0], 0)
    return Advantages(np.nan_to_num(objective.advantages(rewards)), rewards.total, is_equal)


def generation_metrics(plan: RolloutPlan, generation: Generation, advantages: Advantages) -> dict[str, float]:
    """Return the metrics of a generation's answers and rewards, in its first step."""
    samples = generation.all_samples
    metrics = length_metrics(samples)
    if plan.judge.names:
        metrics |= reward_metrics(generation.rewards, plan.judge.names, advantages)
    if plan.objective.divergence_in_reward and plan.objective.uses_reference:
        metrics["kl"] = sum(sample.divergence for sample in samples) / sum(sample.length for sample in samples)
    if plan.config.dynamic_sampling:
        metrics["sampled_prompts"] = generation.sampled
    return metrics


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of lengths in tokens; those of ended answers are 0 where there is none."""
    lengths = np.array([sample.length for sample in samples])
    ended = np.array([sample.ended for sample in samples])
    metrics = {"completions/clipped_ratio": float(1 - ended.mean())}
    for name, values in (("length", lengths), ("terminated_length", lengths[ended] if ended.any() else np.zeros(1))):
        parts = {"mean": values.mean(), "min": values.min(), "max": values.max()}
        metrics |= {f"completions/{part}_{name}": float(value) for part, value in parts.items()}
    return metrics


def reward_metrics(
    rewards: Float[np.ndarray, "prompts answers functions"], names: Sequence[str], advantages: Advantages
) -> dict[str, float]:
    """Return the metrics of rewards; those of a function without any reward are left out.

    Args:
        rewards: NaN where a function left an answer out.
        names: of the functions.
        advantages: of the answers.
    """
    metrics: dict[str, float] = {}
    for name, values in zip(names, np.moveaxis(rewards, -1, 0), strict=True):
        metrics |= {f"rewards/{name}/mean": mean(values).item(), f"rewards/{name}/std": deviation(values).item()}
    total = advantages.rewards
    metrics |= {"reward": mean(total).item(), "reward_std": deviation(total).item()}
    return {name: value for name, value in metrics.items() if not np.isnan(value)} | {
        "frac_reward_zero_std": float(advantages.is_equal.mean())
    }
