"""Dynamic fine-tuning: cross-entropies weighted by the target tokens' own probabilities (arXiv 2508.05629)."""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.objectives.objective import Objective, TargetValues
from jaxglue.settings.config import Excludes

_RISES = "its loss rises before it falls, so the best weights have not the least: watch eval_cross_entropy"


class Dynamic(Objective):
    """Cross-entropies of target tokens times their probabilities, through which no gradient passes."""

    excludes = (*Objective.excludes, Excludes("keep", _RISES), Excludes("early_stopping", _RISES))

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the name of the mean that supervised training has as its loss."""
        return ("cross_entropy",)

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, " sums"]:
        """Return [Σ loss weight · p · cross-entropy, Σ loss weight · cross-entropy]."""
        log_probs = values.log_probs
        entropies = -batch.loss_weights * log_probs
        return jnp.stack([jnp.sum(stop_gradient(jnp.exp(log_probs)) * entropies), stop_gradient(jnp.sum(entropies))])
