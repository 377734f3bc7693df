"""Policy gradients of answers that the model wrote: GRPO and its kin, in TRL's forms and under its names."""

import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch, Rollouts
from jaxglue.objectives.config import (
    PolicyGradientSettings,
    RLOOSettings,
    RolloutSettings,
    SAPOSettings,
    VESPOSettings,
)
from jaxglue.objectives.objective import Objective, ObjectiveConfig, TargetValues
from jaxglue.ops.collectives import TOKEN_AXES, all_gather, psum

Tokens = Float[Array, "B T"]
"""A value for each token."""
_COUNTS = ("tokens", "answers", "sampled", "measured")
"""Sums by which the others are divided."""
_BY_TOKEN = ("kl",)
_CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
_SAMPLING = (
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/signed_mean"),
    "sampling/importance_sampling_ratio/mean",
)


class StepCounts(NamedTuple):
    """Sizes of an optimizer step, over all devices."""

    answers: int
    tokens: float
    """Counted tokens of the answers."""
    micro_batches: int
    longest: int
    """The most tokens of an answer."""


class RolloutObjective(Objective):
    """Losses of answers that the model writes in training."""

    Settings: ClassVar[type[ObjectiveConfig]] = RolloutSettings
    needs_rollouts = True
    generations: ClassVar[int]
    """Answers to each prompt where no number is given."""
    compares: ClassVar[bool] = False
    """Rewards of answers to one prompt are compared: there must be two at least."""
    leaves_one_out: ClassVar[bool] = False
    """An answer's baseline is the mean of the others, and the divergence is a part of the reward."""

    @property
    def temperature(self) -> float:
        """Return the divisor of the logits."""
        return self.config.temperature

    @property
    def uses_reference(self) -> bool:
        """Tell whether answers need log-probabilities of the model as training begins."""
        return False

    @property
    def masks_truncated(self) -> bool:
        """Tell whether answers that reached their longest length leave the loss."""
        return False

    @property
    def needs_mean_weight(self) -> bool:
        """Tell whether a part of the loss is a mean over all tokens of a step."""
        return False

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number by which a step divides the sum of its losses."""
        raise NotImplementedError


class PolicyGradient(RolloutObjective):
    """Clipped ratios of probabilities, times advantages."""

    Settings: ClassVar[type[ObjectiveConfig]] = PolicyGradientSettings
    learning_rates = {"lora": 1e-5, "full": 1e-6}  # noqa: RUF012 - with all weights TRL's
    generations = 8
    compares = True
    by_answer = False
    """Ratios are of whole answers."""

    @property
    def uses_reference(self) -> bool:
        """Tell whether there is a divergence."""
        return self.beta > 0

    @property
    def needs_mean_weight(self) -> bool:
        """Tell whether there is a bonus of entropy."""
        return self.config.entropy_coef > 0

    @property
    def masks_truncated(self) -> bool:
        """Tell whether `--mask-truncated-completions` is on."""
        return self.config.mask_truncated_completions

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums behind the metrics."""
        return (*_COUNTS, "policy_loss", "entropy", *_BY_TOKEN, *_CLIPPED, *_SAMPLING)

    @property
    def title(self) -> str:
        """Return the name with β."""
        return f"{self.config.objective}, beta {self.beta:g}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the ratios from which on, and up to which, the loss has a gradient."""
        low, high = self.config.epsilon_low, self.config.epsilon_high
        return 1 - low, 1 + (low if high is None else high)

    def token_weights(self, counted: Tokens, lengths: Tokens) -> Tokens:
        """Return each token's weight in the sum of losses.

        Args:
            counted: 1 for tokens of answers, 0 for others.
            lengths: counted tokens of each token's answer, at least 1.
        """
        return counted

    def log_ratio(self, difference: Tokens, rollouts: Rollouts, lengths: Tokens) -> Tokens:
        """Return the logarithm of each token's ratio from the differences of log-probabilities."""
        return difference

    def policy_losses(self, ratio: Tokens, advantages: Tokens, log_probs: Tokens) -> Tokens:
        """Return the losses of tokens without the divergence."""
        clipped = jnp.clip(ratio, *self.bounds)
        if self.config.delta is not None:
            ratio = jnp.minimum(ratio, self.config.delta)
        return -jnp.minimum(ratio * advantages, clipped * advantages)

    def corrected(
        self, correction: Tokens, difference: Tokens, advantages: Tokens, rollouts: Rollouts, counted: Tokens
    ) -> Tokens:
        """Return the constant weights of the losses of tokens, from those that correct for sampling.

        Args:
            correction: weights for differences between sampling and training; 1 without.
            difference: log-probabilities less those under the weights that wrote the answers; 0 where none counts.
            advantages: of each token's answer.
            rollouts: the answers.
            counted: 1 for tokens of answers, 0 for others.
        """
        return correction

    def clipped(self, ratio: Tokens, advantages: Tokens, weights: Tokens) -> tuple[Tokens, Tokens]:
        """Tell where the ratio is below its range in a bad answer, and above it in a good one."""
        low, high = self.bounds
        return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, " sums"]:
        """Return [Σ loss, Σ of each of `sums`] over the answers in this device's rows."""
        assert batch.rollouts is not None
        rollouts, counted, log_probs = batch.rollouts, batch.loss_weights, values.log_probs
        now = stop_gradient(log_probs)
        old = now if rollouts.old is None else rollouts.old
        lengths = jnp.maximum(rollouts.spread(rollouts.sums(counted)), 1)
        advantages = rollouts.spread(rollouts.advantages)

        difference = _where(counted, log_probs - old)
        ratio = jnp.exp(self.log_ratio(difference, rollouts, lengths))
        correction, sampled, sampling = self._correct(old, rollouts, counted)
        weights = self.corrected(correction, stop_gradient(difference), advantages, rollouts, counted)
        losses = self.policy_losses(ratio, advantages, log_probs)
        uncertain = self._uncertain(values, counted)
        losses *= weights * uncertain * self._near_policy(now, old, rollouts, counted, lengths)
        divergence = jnp.zeros_like(ratio)
        if self.beta and not self.leaves_one_out:
            assert rollouts.reference is not None
            divergence = k3(_where(counted, rollouts.reference - log_probs))
            if self.config.use_bias_correction_kl:
                divergence *= ratio
            losses += self.beta * divergence

        loss = jnp.sum(self.token_weights(counted, lengths) * _where(counted, losses))
        policy_loss = loss
        if self.config.entropy_coef:
            loss -= self.config.entropy_coef * self._entropy(values, rollouts, counted, uncertain)
        shares = counted / lengths
        low, high = self.clipped(ratio, advantages, weights)
        entropy, measured = values.entropy
        metrics = [counted, shares, sampled, measured, policy_loss, entropy, counted * divergence]
        metrics += [
            (shares if self.by_answer else counted) * clipped for clipped in (low, high, jnp.logical_or(low, high))
        ]
        return jnp.stack([loss, *(stop_gradient(jnp.sum(value)) for value in (*metrics, *sampling))])

    def _uncertain(self, values: TargetValues, counted: Tokens) -> Tokens:
        """Return 1 for tokens whose entropy is large enough to be trained, and 0 for others."""
        if self.config.top_entropy_quantile == 1:
            return jnp.ones_like(counted)
        found = stop_gradient(values.trained_entropies) if self.config.entropy_coef else values.entropies
        whole = all_gather(jnp.where(counted > 0, found, jnp.nan).ravel(), *TOKEN_AXES)
        return jnp.where(found >= jnp.nanquantile(whole, 1 - self.config.top_entropy_quantile), counted, 0)

    def _near_policy(self, now: Tokens, old: Tokens, rollouts: Rollouts, counted: Tokens, lengths: Tokens) -> Tokens:
        """Return 0 for tokens that leave the loss with their answer, and 1 for others."""
        if (threshold := self.config.off_policy_mask_threshold) is None:
            return jnp.ones_like(counted)
        before = old if rollouts.sampler is None else rollouts.sampler
        moved = rollouts.spread(rollouts.sums(_where(counted, jnp.nan_to_num(before - now)))) / lengths
        return ((rollouts.spread(rollouts.advantages) >= 0) | (moved <= threshold)).astype(counted.dtype)

    def _entropy(self, values: TargetValues, rollouts: Rollouts, counted: Tokens, uncertain: Tokens) -> Array:
        """Return the micro-batch's part of the mean entropy over the step's tokens, of which some may be left out."""
        assert rollouts.mean_weight is not None
        kept = counted * uncertain
        share = psum(counted.sum(), *TOKEN_AXES) / jnp.maximum(psum(kept.sum(), *TOKEN_AXES), 1)
        return jnp.sum(rollouts.mean_weight * kept * values.trained_entropies) * share

    def _correct(self, old: Tokens, rollouts: Rollouts, counted: Tokens) -> tuple[Tokens, Tokens, list[Tokens]]:
        """Return the weights that correct for sampling's log-probabilities, the tokens that have one, and statistics.

        A token without one has the ratio 1.
        """
        if rollouts.sampler is None:
            return jnp.ones_like(counted), jnp.zeros_like(counted), [jnp.zeros_like(counted)] * len(_SAMPLING)
        sampled = counted * jnp.isfinite(rollouts.sampler)
        shares = counted / jnp.maximum(rollouts.spread(rollouts.sums(counted)), 1)
        difference = stop_gradient(_where(sampled, old - rollouts.sampler))
        level, _, bound = self.config.importance_sampling_mode.partition("_")
        log_ratio = rollouts.spread(rollouts.sums(difference)) if level == "sequence" else difference
        low, high = self.config.importance_sampling_min, self.config.importance_sampling_max
        ratio = jnp.exp(log_ratio)
        if bound == "mask":
            ratio = jnp.where((ratio >= low) & (ratio <= high), ratio, 0)  # which may be infinite
        elif bound == "truncate":
            ratio = jnp.clip(ratio, low, high)
        statistics = [jnp.abs(difference), -difference, (shares if level == "sequence" else sampled) * ratio]
        return jnp.ones_like(counted) if level == "none" else ratio, sampled, statistics

    def metrics(self, values: Float[Array, " sums"]) -> dict[str, Array]:
        """Return the metrics by TRL's names: means over tokens, or over answers."""
        named = dict(zip(self.sums, values[1:], strict=True))
        tokens, answers, sampled, measured = (named.pop(name) for name in _COUNTS)
        if not self.beta or self.leaves_one_out:
            del named["kl"]
        if not self.config.entropy_coef:
            del named["policy_loss"]
        divisors = (
            {"policy_loss": 1.0, "entropy": measured}
            | dict.fromkeys(_BY_TOKEN, tokens)
            | dict.fromkeys(_SAMPLING, sampled)
        )
        divisors |= dict.fromkeys(_CLIPPED, answers if self.by_answer else tokens)
        if self.config.importance_sampling_mode.startswith("sequence"):
            divisors["sampling/importance_sampling_ratio/mean"] = answers
        return {name: value / jnp.maximum(divisors[name], 1e-30) for name, value in named.items()}


def _where(counted: Tokens, values: Tokens) -> Tokens:
    """Return the values of counted tokens, and 0 for others, whose values may be anything."""
    return jnp.where(counted > 0, values, 0)


def k3(difference: Tokens) -> Tokens:
    """Estimate the divergence from the reference by d = log π_ref − log π: exp(d) − d − 1, never negative."""
    return jnp.exp(difference) - difference - 1


class GRPO(PolicyGradient):
    """Means over each answer's tokens, then over answers (arXiv 2402.03300)."""

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number of answers."""
        return counts.answers

    def token_weights(self, counted: Tokens, lengths: Tokens) -> Tokens:
        """Return 1 over the answer's length."""
        return counted / lengths


class DrGRPO(PolicyGradient):
    """Sums over tokens, divided by a constant, so that length has no weight (arXiv 2503.20783)."""

    def normalizer(self, counts: StepCounts) -> float:
        """Return the tokens of as many answers of the greatest length."""
        return counts.answers * counts.longest


class DAPO(PolicyGradient):
    """The mean over all tokens of a step (arXiv 2503.14476)."""

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number of tokens."""
        return max(counts.tokens, 1)


class BNPO(PolicyGradient):
    """Means over the tokens of each micro-batch, on all devices, then over micro-batches."""

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number of micro-batches."""
        return counts.micro_batches

    def token_weights(self, counted: Tokens, lengths: Tokens) -> Tokens:
        """Return 1 over the tokens of the micro-batch."""
        return counted / jnp.maximum(psum(counted.sum(), *TOKEN_AXES), 1)


class GSPO(GRPO):
    """GRPO with the ratio of an answer, the geometric mean of its tokens' ratios (arXiv 2507.18071)."""

    by_answer = True

    def log_ratio(self, difference: Tokens, rollouts: Rollouts, lengths: Tokens) -> Tokens:
        """Return the mean over the answer's tokens."""
        return rollouts.spread(rollouts.sums(difference)) / lengths


def _with_high_as(name: str, metrics: dict[str, Array]) -> dict[str, Array]:
    """Return the metrics with the mean above the upper bound under this name, in place of all of clipped ratios."""
    kept = {key: value for key, value in metrics.items() if key not in _CLIPPED}
    return kept | {name: metrics["clip_ratio/high_mean"]}


class CISPO(DAPO):
    """Log-probabilities weighted by capped ratios without a gradient, so that no token is left out (2506.13585)."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return 0 and the cap of the ratios."""
        return 0.0, 5.0 if self.config.epsilon_high is None else self.config.epsilon_high

    def policy_losses(self, ratio: Tokens, advantages: Tokens, log_probs: Tokens) -> Tokens:
        """Return the losses of tokens without the divergence."""
        return -stop_gradient(jnp.minimum(ratio, self.bounds[1])) * advantages * log_probs

    def metrics(self, values: Float[Array, " sums"]) -> dict[str, Array]:
        """Return the metrics, with the share of capped ratios in place of the clipped ones."""
        return _with_high_as("cispo_clip_ratio", super().metrics(values))


class SAPO(GRPO):
    """Ratios through a sigmoid, whose gradient falls off around 1, in place of clipped ones (arXiv 2511.20347)."""

    Settings = SAPOSettings

    def policy_losses(self, ratio: Tokens, advantages: Tokens, log_probs: Tokens) -> Tokens:
        """Return the losses of tokens without the divergence."""
        sharpness = jnp.where(advantages > 0, self.config.sapo_temperature_pos, self.config.sapo_temperature_neg)
        return -jax.nn.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * advantages

    def metrics(self, values: Float[Array, " sums"]) -> dict[str, Array]:
        """Return the metrics; nothing is clipped."""
        return {name: value for name, value in super().metrics(values).items() if name not in _CLIPPED}


class LUSPO(GSPO):
    """GSPO with answers weighted by their length, so that no token of a long one counts less (arXiv 2602.05261)."""

    def token_weights(self, counted: Tokens, lengths: Tokens) -> Tokens:
        """Return 1 for each token of an answer."""
        return counted


class VESPO(DAPO):
    """Log-probabilities weighted by e^λ · w^k · e^(−λw) of the answers' ratios w, which favors those near 1."""

    Settings = VESPOSettings
    by_answer = True

    def policy_losses(self, ratio: Tokens, advantages: Tokens, log_probs: Tokens) -> Tokens:
        """Return the losses of tokens without the divergence."""
        return -advantages * log_probs

    def corrected(
        self, correction: Tokens, difference: Tokens, advantages: Tokens, rollouts: Rollouts, counted: Tokens
    ) -> Tokens:
        """Return the answers' weights, of ratios to the probabilities of sampling."""
        least, most = math.log(1e-8), 20.0
        sampled = jnp.clip(jnp.log(correction), least, most)
        tokens = _where(counted, jnp.clip(difference, -most, most) + sampled)
        log_ratio = jnp.clip(rollouts.spread(rollouts.sums(tokens)), least, most)
        config, good = self.config, advantages >= 0
        k = jnp.where(good, config.vespo_k_pos, config.vespo_k_neg)
        slope = jnp.where(good, config.vespo_lambda_pos, config.vespo_lambda_neg)
        return jnp.exp(slope + k * log_ratio - slope * jnp.exp(log_ratio))

    def clipped(self, ratio: Tokens, advantages: Tokens, weights: Tokens) -> tuple[Tokens, Tokens]:
        """Return no clipped ratios, and the weights."""
        return jnp.zeros_like(weights), weights

    def metrics(self, values: Float[Array, " sums"]) -> dict[str, Array]:
        """Return the metrics, with the answers' mean weight in place of clipped ratios."""
        return _with_high_as("vespo/phi_seq_mean", super().metrics(values))


class RLOO(GRPO):
    """REINFORCE with the mean of the other answers as the baseline (arXiv 2402.14740); ratios are of whole answers."""

    Settings = RLOOSettings
    generations = 2
    by_answer = leaves_one_out = True

    def log_ratio(self, difference: Tokens, rollouts: Rollouts, lengths: Tokens) -> Tokens:
        """Return the sum over the answer's tokens."""
        return rollouts.spread(rollouts.sums(difference))
