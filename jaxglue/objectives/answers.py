"""Objectives of packed units of two answers, from the log-probabilities of their tokens."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.nn import log_sigmoid
from jaxtyping import Array, Float

from jaxglue.data.batch import CHOSEN, PROMPT, REJECTED, Answers, Batch, sum_parts
from jaxglue.data.config import AnswerTask
from jaxglue.objectives.config import BetaSettings, IPOSettings, PairSettings
from jaxglue.objectives.objective import Objective, ObjectiveConfig, TargetValues

Values = Float[Array, "*U"]
"""A value for each unit."""


class Pairs(NamedTuple):
    """Log-probabilities of pairs of answers."""

    chosen: Values
    """Sum over the preferred answer's tokens."""
    rejected: Values
    reference_chosen: Values
    """Values of the reference; 0 for objectives without one."""
    reference_rejected: Values
    chosen_tokens: Values
    rejected_tokens: Values

    @property
    def chosen_ratio(self) -> Values:
        """Return log π/π_ref of the preferred answers."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Values:
        """Return log π/π_ref of the other answers."""
        return self.rejected - self.reference_rejected

    @property
    def chosen_mean(self) -> Values:
        """Return the mean over the preferred answer's tokens."""
        return self.chosen / jnp.maximum(self.chosen_tokens, 1)

    @property
    def rejected_mean(self) -> Values:
        """Return the mean over the other answer's tokens."""
        return self.rejected / jnp.maximum(self.rejected_tokens, 1)

    @property
    def mean_difference(self) -> Values:
        """Return the difference of log π/π_ref for each token."""
        chosen, rejected = jnp.maximum(self.chosen_tokens, 1), jnp.maximum(self.rejected_tokens, 1)
        return self.chosen_ratio / chosen - self.rejected_ratio / rejected


class AnswerObjective(Objective):
    """Sum of the losses of a batch's units, beside sums for its metrics."""

    answers = AnswerTask()
    learning_rates = {"lora": 5e-6, "full": 5e-7}  # noqa: RUF012 - as in TRL's and Zephyr's recipes

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, " sums"]:
        """Return [Σ loss, Σ of each metric] over the units of this device's rows."""
        assert batch.answers is not None
        assert batch.answers.reference is not None or not self.needs_reference
        losses, metrics = self.units(values, batch, batch.answers)
        return jnp.stack([jnp.sum(batch.answers.used * value) for value in (losses, *map(stop_gradient, metrics))])

    def units(self, values: TargetValues, batch: Batch, answers: Answers) -> tuple[Values, list[Values]]:
        """Return the losses of units, and their values for `sums`."""
        raise NotImplementedError


class PairObjective(AnswerObjective):
    """Losses of pairs by the log-probabilities of their answers."""

    Settings: ClassVar[type[ObjectiveConfig]] = BetaSettings
    by_token = False
    """Rewards in metrics are of log-probabilities for each token."""

    def losses(self, pairs: Pairs) -> Values:
        """Return the pairs' losses."""
        raise NotImplementedError

    @property
    def supervised_weight(self) -> float:
        """Return the weight of the preferred answers' supervised loss (RPO, arXiv 2404.19733)."""
        return self.config.rpo_alpha if isinstance(self.config, PairSettings) else 0.0

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the metrics, TRL's."""
        return (*_PAIRS, *(("nll_loss",) if self.supervised_weight else ()))

    @property
    def title(self) -> str:
        """Return the name with β."""
        return f"{self.config.objective}, beta {self.beta:g}"

    def units(self, values: TargetValues, batch: Batch, answers: Answers) -> tuple[Values, list[Values]]:
        """Return the losses of pairs, and their metrics."""
        sums = sum_parts(values.log_probs, answers)
        counts = sum_parts(batch.loss_weights, answers)
        weighting = isinstance(self.config, IPOSettings) and self.config.use_weighting
        alignment = values.alignment if weighting else None
        reference, used = reference_of(answers, sums), answers.used[..., None] > 0
        # Unused slots would have answers of probability 1, whose odds are infinite.
        sums, counts = jnp.where(used, sums, -1.0), jnp.where(used, counts, 1.0)
        pairs = Pairs(
            chosen=sums[..., CHOSEN],
            rejected=sums[..., REJECTED],
            reference_chosen=reference[..., CHOSEN],
            reference_rejected=reference[..., REJECTED],
            chosen_tokens=counts[..., CHOSEN],
            rejected_tokens=counts[..., REJECTED],
        )
        losses = self.losses(pairs)
        supervised = -(sums[..., CHOSEN] + sums[..., PROMPT]) * answers.token_weight
        if weight := self.supervised_weight:
            losses += weight * supervised
        if alignment is not None:
            means = sum_parts(stop_gradient(alignment), answers)[..., :PROMPT] / jnp.maximum(counts[..., :PROMPT], 1)
            losses *= jnp.exp(means.sum(-1))
        measures = self.measures(pairs) | {"nll_loss": supervised}
        return losses, [measures[name] for name in self.sums]

    def measures(self, pairs: Pairs) -> dict[str, Values]:
        """Return the metrics of pairs by name."""
        scores = (pairs.chosen_mean, pairs.rejected_mean)
        scores = scores if self.by_token else (pairs.chosen_ratio, pairs.rejected_ratio)
        chosen, rejected = (self.beta * score for score in scores)
        shown = scores if self.by_token else (pairs.chosen, pairs.rejected)
        return dict(zip(_PAIRS, (chosen, rejected, (chosen > rejected) * 1.0, chosen - rejected, *shown), strict=True))


_PAIRS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


def smoothed(logits: Values, smoothing: float) -> Values:
    """Return −log σ of the logits, where a pair's order is wrong with probability `smoothing`."""
    if smoothing == 0.0:
        return -log_sigmoid(logits)
    return -log_sigmoid(logits) * (1 - smoothing) - log_sigmoid(-logits) * smoothing


def reference_of(answers: Answers, sums: Float[Array, "B U parts"]) -> Float[Array, "B U 2"]:
    """Return the reference's log-probabilities of the answers; zeros where there are none."""
    return jnp.zeros((*sums.shape[:2], 2)) if answers.reference is None else answers.reference
