"""Supervised fine-tuning: the cross-entropy of target tokens; importing it loads no JAX."""

from typing import TYPE_CHECKING

from jaxglue.objectives.objective import NO_ROLLOUTS, Objective, TargetValues

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from jaxglue.data.batch import Batch


class Supervised(Objective):
    """Cross-entropy of the target tokens."""

    supervised = True
    excludes = (NO_ROLLOUTS,)

    def __call__(self, values: TargetValues, batch: "Batch") -> "Float[Array, '']":
        """Return Σ loss weight · cross-entropy."""
        return values.cross_entropy
