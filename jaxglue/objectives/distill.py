"""Distillation on the model's own answers: divergences between its distributions and a teacher's (arXiv 2306.13649)."""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.objectives.config import DistillSettings
from jaxglue.objectives.objective import TargetValues
from jaxglue.objectives.policy_gradient import RolloutObjective, StepCounts


class Distillation(RolloutObjective):
    """Divergences over the vocabulary, the mean over all tokens of a step."""

    Settings = DistillSettings
    needs_teacher = True
    generations = 1
    learning_rates = {"lora": 1e-4, "full": 1e-6}  # noqa: RUF012 - with all weights TRL's

    @property
    def title(self) -> str:
        """Return the divergence."""
        name = {0.0: "forward KL", 1.0: "reverse KL"}.get(self.beta, f"JSD, beta {self.beta:g}")
        top = self.config.distill_top_k
        return f"distill, {name}" + (f" of the {top} most likely tokens and the rest" if top else "")

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums behind the metrics."""
        return ("entropy", "measured")

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number of tokens."""
        return max(counts.tokens, 1)

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, " sums"]:
        """Return [Σ divergence, Σ of each of `sums`] over the answers in this device's rows."""
        loss = jnp.sum(values.divergences(self.beta, self.config.distill_top_k))
        return jnp.stack([loss, *map(stop_gradient, values.entropy)])

    def metrics(self, values: Float[Array, " sums"]) -> dict[str, Array]:
        """Return the mean entropy of the tokens' distributions."""
        entropy, measured = values[1:]
        return {"entropy": entropy / jnp.maximum(measured, 1e-30)}
