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


def turn_credits(plan: RolloutPlan, generation: Generation) -> list[list[Float[np.ndarray, " L"]]]:
    """Return the advantages of episodes' tokens: those of a turn are by the rewards from it on.

    They are compared with what the prompt's other episodes had from their turn of the same number on. An episode's
    reward less those of its turns before is what it had from one on.
    """
    totals = rewards_of(plan, generation).total
    turns = [[_turn_rewards(plan, sample) for sample in group] for group in generation.samples]
    count = max((len(rewards) for group in turns for rewards in group), default=0)
    left = np.full((*totals.shape, count), np.nan)
    for index, group in enumerate(turns):
        for number, rewards in enumerate(group):
            before = np.cumsum([0.0, *rewards])[: len(rewards)]
            left[index, number, : len(rewards)] = totals[index, number] - before
    advantages = [
        np.nan_to_num(plan.objective.advantages(Rewards(by_function=left[:, :, [turn]], weights=np.ones(1))))
        for turn in range(count)
    ]
    return [
        [_spread(sample, [each[index, number] for each in advantages]) for number, sample in enumerate(group)]
        for index, group in enumerate(generation.samples)
    ]


def _turn_rewards(plan: RolloutPlan, sample: Sample) -> list[float]:
    """Return the weighted rewards of an episode's turns; 0 for those without."""
    if sample.episode is None:
        return [0.0]
    names = plan.judge.names
    weight = plan.judge.weights[names.index(sample.episode.name)] if sample.episode.name in names else 1.0
    return [0.0 if np.isnan(reward) else float(weight * reward) for reward in sample.episode.turn_rewards]


def _spread(sample: Sample, advantages: Sequence[float]) -> Float[np.ndarray, " L"]:
    """Return each token's advantage, of its turn; those between turns have that of the next."""
    ends = [len(sample.tokens)] if sample.episode is None else sample.episode.turn_ends
    credits = np.zeros(len(sample.tokens), np.float32)
    for start, end, value in zip([0, *ends[:-1]], ends, advantages, strict=False):
        credits[start:end] = value
    return credits


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of episodes, TRL's of tools among them; none without episodes."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    calls, turns = sum(episode.calls for episode in episodes), [len(episode.turn_rewards) for episode in episodes]
    return {
        "episodes/turns": float(np.mean(turns)),
        "episodes/died": sum(episode.died is not None for episode in episodes) / len(episodes),
        "tools/call_frequency": calls / len(episodes),
        "tools/failure_frequency": sum(episode.failures for episode in episodes) / max(calls, 1),
    }


def generation_metrics(plan: RolloutPlan, generation: Generation, advantages: Advantages) -> dict[str, float]:
    """Return the metrics of a generation's answers and rewards, in its first step."""
    samples = generation.all_samples
    metrics = length_metrics(samples) | episode_metrics(samples)
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
