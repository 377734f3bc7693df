"""On-policy distillation by the log-probabilities that a teacher gives the tokens which the model has sampled."""

import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxglue.objectives.config import RolloutSettings
from jaxglue.objectives.rollouts import (
    ANSWERS_EXCLUDE,
    HELD_OUT_EXCLUDES,
    LossInputs,
    Metric,
    RolloutObjective,
    StepCounts,
    Tokens,
)
from jaxglue.settings.config import Excludes, Requires

_BY_SERVER = "it learns from servers: --objective distill has a folder's distributions"


class TokenDistillation(RolloutObjective):
    """A policy gradient whose advantage is a token's log π_teacher − log π, the mean over all tokens of a step.

    Its expected gradient is that of the reverse divergence KL(π‖π_teacher) of each token's distribution, of which the
    sampled token is a draw.
    """

    Settings = RolloutSettings
    excludes = (
        *ANSWERS_EXCLUDE,
        *(Excludes(name, _BY_SERVER) for name in ("teacher", "teacher_quantize")),
        HELD_OUT_EXCLUDES,
        Excludes("dynamic_sampling", "it chooses prompts by their rewards, which are not trained on"),
        Excludes("staleness", "it corrects for no older weights"),
        Excludes("lmbda", "a teacher judges tokens that the model has sampled"),
        Excludes("temperature", "servers' log-probabilities are those of temperature 1", lambda value: value != 1),
    )
    requires = (Requires(("teacher_server",), "it asks a server, such as http://127.0.0.1:8000/v1"),)
    reference_is_served = True
    generations = 1
    learning_rates = {"lora": 1e-4, "full": 1e-6}  # noqa: RUF012 - those of distillation

    @property
    def title(self) -> str:
        """Return the divergence."""
        return "distill_tokens, reverse KL by sampled tokens"

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number of tokens."""
        return max(counts.tokens, 1)

    def loss_and_metrics(self, inputs: LossInputs) -> tuple[Tokens, dict[str, Metric]]:
        """Return −r · A of each token, and the mean of log π − log π_teacher under the weights that wrote it."""
        differences = inputs.of_counted(stop_gradient(inputs.old - inputs.reference))
        losses = inputs.counted * jnp.exp(inputs.log_ratio) * differences
        return losses, {"teacher_kl": inputs.mean(differences), "entropy": Metric(*inputs.values.entropy)}
