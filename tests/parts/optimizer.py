"""An optimizer with a setting of its own: steps along the sign of the gradient, smoothed."""

from dataclasses import dataclass
from typing import Annotated

import optax

from jaxglue.settings.config import Range
from jaxglue.training.optax_optimizer import OptaxOptimizer
from jaxglue.training.optimizer import OPTIMIZERS, OptimizerConfig, OptimizerKind


@dataclass(frozen=True, kw_only=True)
class SignSettings(OptimizerConfig):
    """Signs of smoothed gradients."""

    smoothing: Annotated[float, Range(ge=0, lt=1)] = 0.5
    """Decay of the mean of gradients."""


class Sign(OptaxOptimizer):
    """The sign of a mean of gradients."""

    def transform(self, path, parameter):
        return optax.chain(optax.ema(self._config.smoothing, debias=False), optax.scale_by_sign())


OPTIMIZERS.add("sign", OptimizerKind(make=Sign, title="sign of gradients", Settings=SignSettings, rate_factor=0.1))
