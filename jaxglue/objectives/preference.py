"""Losses and metrics of packed units of answers, from the log-probabilities of their tokens."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxglue.data.batch import CHOSEN, PROMPT, REJECTED, Answers, Batch, sum_parts
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.losses import PAIR_LOSSES, Pairs, kto, log_odds, reward
from jaxglue.ops.collectives import BATCH_AXES, psum

_PAIRS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
_REWARD = ("mean_reward", "accuracy", "margin")
_KTO = ("rewards/chosen", "logps/chosen", "desirable", "rewards/rejected", "logps/rejected", "kl")

TokenValues = Float[Array, "B T"]


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """Sum of the losses of a batch's units, beside sums for its metrics; static and hashable."""

    config: ObjectiveConfig

    @property
    def needs_alignment(self) -> bool:
        """Return whether the loss weights pairs by tokens' probabilities (WPO)."""
        return self.config.use_weighting

    @property
    def values(self) -> int:
        """Return how many sums a call returns."""
        return 1 + len(_KTO if self.config.objective == "kto" else self._names)

    def __call__(self, log_probs: TokenValues, alignment: TokenValues | None, batch: Batch) -> Float[Array, " values"]:
        """Return [Σ loss, Σ of each metric] over the units of this device's rows.

        Args:
            log_probs: of every target, 0 where it does not count; of reward models, scores of tokens.
            alignment: log-probabilities less log Σ p² over the vocabulary, for WPO.
            batch: with answers, and their reference's log-probabilities where the objective compares.
        """
        assert batch.answers is not None
        answers, sums = batch.answers, sum_parts(log_probs, batch.answers)
        assert answers.reference is not None or not self.config.needs_reference
        if self.config.objective == "kto":
            losses, metrics = self._kto(sums, answers)
        elif self.config.objective == "reward":
            losses, metrics = self._reward(sums, answers)
        else:
            counts = sum_parts(batch.loss_weights, answers)
            losses, metrics = self._pairs(sums, counts, alignment, answers)
        return jnp.stack([jnp.sum(answers.used * value) for value in (losses, *map(stop_gradient, metrics))])

    def metrics(self, values: Float[Array, " values"]) -> dict[str, Array]:
        """Return the metrics of a step by TRL's names, from the sums of `__call__` over its units, divided by these."""
        _, *means = values
        if self.config.objective != "kto":
            return dict(zip(self._names, means, strict=True))
        named = dict(zip(_KTO, means, strict=True))
        good = named.pop("desirable")
        shares = {"chosen": jnp.maximum(good, 1e-9), "rejected": jnp.maximum(1 - good, 1e-9)}
        named |= {name: named[name] / shares[name.partition("/")[2]] for name in named if name != "kl"}
        return named | {"rewards/margins": named["rewards/chosen"] - named["rewards/rejected"]}

    @property
    def _names(self) -> tuple[str, ...]:
        if self.config.objective == "reward":
            return _REWARD
        supervised = self.config.objective == "orpo" or self.config.rpo_alpha > 0
        odds = ("log_odds_ratio", "log_odds_chosen") if self.config.objective == "orpo" else ()
        return _PAIRS + odds + (("nll_loss",) if supervised else ())

    def _pairs(self, sums, counts, alignment: TokenValues | None, answers: Answers) -> tuple[Array, list[Array]]:
        config, reference, used = self.config, _reference(answers, sums), answers.used[..., None] > 0
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
        losses = PAIR_LOSSES[config.objective](pairs, config)
        supervised = -(sums[..., CHOSEN] + sums[..., PROMPT]) * answers.token_weight
        if weight := 1.0 if config.objective == "orpo" else config.rpo_alpha:
            losses += weight * supervised
        if alignment is not None:
            means = sum_parts(stop_gradient(alignment), answers)[..., :PROMPT] / jnp.maximum(counts[..., :PROMPT], 1)
            losses *= jnp.exp(means.sum(-1))
        return losses, self._pair_metrics(pairs, supervised)

    def _pair_metrics(self, pairs: Pairs, supervised: Array) -> list[Array]:
        by_token = self.config.objective in ("orpo", "simpo")
        scores = (pairs.chosen_mean, pairs.rejected_mean) if by_token else (pairs.chosen_ratio, pairs.rejected_ratio)
        chosen, rejected = (self.config.beta * score for score in scores)
        shown = scores if by_token else (pairs.chosen, pairs.rejected)
        odds = log_odds(pairs)
        values = dict(
            zip(_PAIRS, (chosen, rejected, (chosen > rejected) * 1.0, chosen - rejected, *shown), strict=True)
        )
        values |= {"log_odds_ratio": jax.nn.log_sigmoid(odds), "log_odds_chosen": odds, "nll_loss": supervised}
        return [values[name] for name in self._names]

    def _reward(self, sums, answers: Answers) -> tuple[Array, list[Array]]:
        """Return Bradley-Terry losses and metrics of the scores of pairs."""
        chosen, rejected = sums[..., CHOSEN], sums[..., REJECTED]
        losses = reward(chosen, rejected, 0.0 if answers.margin is None else answers.margin, self.config)
        return losses, [(chosen + rejected) / 2, (chosen > rejected) * 1.0, chosen - rejected]

    def _kto(self, sums, answers: Answers) -> tuple[Array, list[Array]]:
        """Return losses and metrics of labeled answers; the second answer of a unit serves the divergence alone.

        The divergence is the micro-batch's, over all devices.
        """
        reference, desirable = _reference(answers, sums), answers.desirable
        unrelated = stop_gradient(answers.used * (sums[..., REJECTED] - reference[..., REJECTED]))
        total, count = (psum(value.sum(), *BATCH_AXES) for value in (unrelated, answers.used))
        kl = jnp.maximum(total / jnp.maximum(count, 1), 0)
        ratio = sums[..., CHOSEN] - reference[..., CHOSEN]
        rewards = self.config.beta * ratio
        good = [rewards * desirable, sums[..., CHOSEN] * desirable, desirable]
        bad = [rewards * (1 - desirable), sums[..., CHOSEN] * (1 - desirable)]
        return kto(ratio, desirable, kl, self.config), [*good, *bad, jnp.broadcast_to(kl, ratio.shape)]


def _reference(answers: Answers, like: Any) -> Float[Array, "B U 2"]:
    return jnp.zeros((*like.shape[:2], 2)) if answers.reference is None else answers.reference
