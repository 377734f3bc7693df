"""Clip-Cov (arXiv 2505.22617) on leave-one-out advantages: some of the tokens that drive entropy down are left out."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxglue.objectives.advantages import leave_one_out
from jaxglue.objectives.config import PolicyGradientSettings
from jaxglue.objectives.objective import OBJECTIVES
from jaxglue.objectives.policy_gradient import DAPO
from jaxglue.settings.config import Range


@dataclass(frozen=True, kw_only=True)
class ClipCovSettings(PolicyGradientSettings):
    """Clip-Cov."""

    clip_cov_share: Annotated[float, Range(ge=0, le=1)] = 0.5
    """Share of the tokens of large covariance that leave the loss."""
    clip_cov_least: float = 0.1
    """Covariance of log-probability and advantage from which on it is large."""


@OBJECTIVES.register("clip_cov")
class ClipCov(DAPO):
    """DAPO without some of the tokens whose log-probability and advantage rise together."""

    Settings = ClipCovSettings

    def advantages(self, rewards):
        return leave_one_out(rewards.total)

    def policy_losses(self, inputs, ratio, correction):
        losses, metrics = super().policy_losses(inputs, ratio, correction)
        count = jnp.maximum(inputs.counted.sum(), 1)
        centered = [x - inputs.of_counted(x).sum() / count for x in (inputs.now, inputs.advantages)]
        chosen = jax.random.uniform(jax.random.key(0), losses.shape) < self.config.clip_cov_share
        left_out = chosen & (centered[0] * centered[1] >= self.config.clip_cov_least)
        return jnp.where(left_out, 0, losses), metrics | {"clip_cov/share": inputs.mean(left_out)}
