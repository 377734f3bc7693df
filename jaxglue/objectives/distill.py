"""Distillation on the model's own answers: divergences between its distributions and a teacher's (arXiv 2306.13649)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.objectives.config import DistillSettings
from jaxglue.objectives.rollouts import (
    ANSWERS_EXCLUDE,
    HELD_OUT_EXCLUDES,
    LossInputs,
    Metric,
    RolloutObjective,
    StepCounts,
)
from jaxglue.settings.config import Excludes, Requires


class Distillation(RolloutObjective):
    """Divergences over the vocabulary, the mean over all tokens of a step."""

    Settings = DistillSettings
    excludes = (
        *ANSWERS_EXCLUDE,
        HELD_OUT_EXCLUDES,
        Excludes("teacher_server", "it needs whole distributions: --objective distill_tokens has servers as teachers"),
        Excludes("dynamic_sampling", "it chooses prompts by their rewards, which are not trained on"),
        Excludes("staleness", "it corrects for no older weights"),
    )
    requires = (Requires(("teacher",), "it learns the distributions of a model folder, or of base"),)
    needs_teacher = True
    generations = 1
    learning_rates = {"lora": 1e-4, "full": 1e-6}  # noqa: RUF012 - with all weights TRL's

    @property
    def title(self) -> str:
        """Return the divergence."""
        name = {0.0: "forward KL", 1.0: "reverse KL"}.get(self.beta, f"JSD, beta {self.beta:g}")
        top = self.config.distill_top_k
        beside = f", beside cross-entropy × {self.config.sft_alpha:g}" if self.config.sft_alpha else ""
        return f"distill, {name}" + (f" of the {top} most likely tokens and the rest" if top else "") + beside

    def needs_old(self, steps: int) -> bool:
        """Tell that nothing reads log-probabilities under earlier weights."""
        return False

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number of tokens."""
        return max(counts.tokens, 1)

    def loss_and_metrics(self, inputs: LossInputs) -> tuple[Float[Array, "*terms"], dict[str, Metric]]:
        """Return the tokens' divergences, with the cross-entropy of the rows' answers where it counts, and metrics."""
        losses = inputs.values.divergences(self.beta, self.config.distill_top_k)
        metrics = {"entropy": Metric(*inputs.values.entropy)}
        if not (weight := self.config.sft_alpha):
            return losses, metrics
        sampled = (inputs.counted * jnp.isfinite(inputs.sampler)).any()  # all answers of a step are, or are the rows'
        cross_entropy = jnp.where(sampled, 0.0, inputs.values.cross_entropy)
        return losses.sum() + weight * cross_entropy, metrics | {"sft_loss": Metric(cross_entropy)}
