"""Metrics of a generation, by TRL's names."""

from collections.abc import Sequence

import numpy as np

from jaxglue.objectives.advantages import deviation, mean
from jaxglue.rl.advantages import Advantages
from jaxglue.rl.generate import divergence_of
from jaxglue.rl.plan import RolloutPlan
from jaxglue.rl.record import Generation
from jaxglue.rl.sampler import Sample


def generation_metrics(plan: RolloutPlan, generation: Generation, advantages: Advantages) -> dict[str, float]:
    """Return the metrics of a generation's answers and rewards, in its first step."""
    samples = generation.all_samples
    metrics = length_metrics(samples)
    if plan.judge.names:
        metrics |= reward_metrics(generation.rewards, plan.judge.names, advantages)
    if plan.objective.divergence_in_reward and plan.objective.uses_reference:
        metrics["kl"] = sum(map(divergence_of, samples)) / sum(sample.length for sample in samples)
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


def reward_metrics(rewards: np.ndarray, names: Sequence[str], advantages: Advantages) -> dict[str, float]:
    """Return the metrics of rewards; those of a function without any reward are left out.

    Args:
        rewards: [prompts, answers, functions], NaN where a function left an answer out.
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
