"""Policy gradients of answers that the model wrote: GRPO and its kin, in TRL's forms and under its names."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxglue.objectives.advantages import EPSILON, Rewards, Values, deviation, group_relative, leave_one_out, mean
from jaxglue.objectives.config import PolicyGradientSettings, RLOOSettings, SAPOSettings, VESPOSettings
from jaxglue.objectives.objective import ObjectiveConfig
from jaxglue.objectives.rollouts import LossInputs, Metric, RolloutObjective, StepCounts, Tokens
from jaxglue.ops.collectives import TOKEN_AXES, all_gather, psum


def clipped_losses(ratio: Tokens, advantages: Tokens, low: float, high: float, most: float | None = None) -> Tokens:
    """Return −min(r · A, clip(r, low, high) · A), PPO's losses of tokens (arXiv 1707.06347).

    Args:
        ratio: r, of probabilities under the present and the old weights.
        advantages: A.
        low, high: bounds of the clipped ratio.
        most: cap of the other one, which bounds losses of bad answers (arXiv 2505.07291).
    """
    clipped = jnp.clip(ratio, low, high)
    if most is not None:
        ratio = jnp.minimum(ratio, most)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def weighted_log_probs(weights: Tokens, advantages: Tokens, log_probs: Tokens) -> Tokens:
    """Return −w · A · log π with constant weights w, as CISPO's capped ratios (arXiv 2506.13585)."""
    return -stop_gradient(weights) * advantages * log_probs


def k3(difference: Tokens) -> Tokens:
    """Estimate the divergence from the reference by d = log π_ref − log π: exp(d) − d − 1, never negative."""
    return jnp.exp(difference) - difference - 1


class PolicyGradient(RolloutObjective):
    """Clipped ratios of probabilities, times advantages.

    A subclass may have another `ratio` or `policy_losses`, other `token_weights`, or further metrics, which are added
    to those of a method that it extends.
    """

    Settings: ClassVar[type[ObjectiveConfig]] = PolicyGradientSettings
    learning_rates = {"lora": 1e-5, "full": 1e-6}  # noqa: RUF012 - with all weights TRL's
    generations = 8
    compares = True

    @property
    def by_answer(self) -> bool:
        """Tell whether ratios are of whole answers."""
        return self.config.importance_sampling_level == "sequence"

    @property
    def credits_tokens(self) -> bool:
        """Tell whether tokens may have advantages of their own: not with ratios of whole answers."""
        return not self.by_answer

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
    def title(self) -> str:
        """Return the name with β."""
        return f"{self.config.objective}, beta {self.beta:g}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the ratios from which on, and up to which, the loss has a gradient."""
        low, high = self.config.epsilon_low, self.config.epsilon_high
        return 1 - low, 1 + (low if high is None else high)

    def advantages(self, rewards: Rewards) -> Values:
        """Return the rewards relative to those of the other answers to the prompt."""
        scale, aggregation = self.config.scale_rewards, self.config.multi_objective_aggregation
        return group_relative(rewards, scale=scale, aggregation=aggregation)

    def token_weights(self, inputs: LossInputs) -> Tokens:
        """Return each token's weight in the sum of losses; 0 for tokens that do not count."""
        return inputs.counted

    def ratio(self, inputs: LossInputs) -> Tokens:
        """Return the ratio of probabilities under the present and the old weights, for each token or its answer.

        That of an answer is the geometric mean of its tokens'.
        """
        by_answer = self.by_answer
        return jnp.exp(inputs.over_answers(inputs.log_ratio) / inputs.lengths if by_answer else inputs.log_ratio)

    def policy_losses(self, inputs: LossInputs, ratio: Tokens, correction: Tokens) -> tuple[Tokens, dict[str, Metric]]:
        """Return the losses of tokens without the divergence, and metrics.

        Args:
            inputs: of the micro-batch.
            ratio: of `ratio`.
            correction: constant weights for differences between sampling and training; 1 without.
        """
        low, high = self.bounds
        losses = clipped_losses(ratio, inputs.advantages, low, high, self.config.delta)
        below, above = (ratio < low) & (inputs.advantages < 0), (ratio > high) & (inputs.advantages > 0)
        clipped = {"low": below, "high": above, "region": below | above}
        mean = inputs.mean_of_answers if self.by_answer else inputs.mean
        return losses * correction, {f"clip_ratio/{name}_mean": mean(tokens) for name, tokens in clipped.items()}

    def loss_and_metrics(self, inputs: LossInputs) -> tuple[Float[Array, ""], dict[str, Metric]]:
        """Return the loss of a micro-batch and its metrics: policy, divergence and entropy."""
        config, values = self.config, inputs.values
        metrics = {"entropy": Metric(*values.entropy)}
        correction, sampling = self._correct_sampling(inputs)
        ratio = self.ratio(inputs)
        losses, clipping = self.policy_losses(inputs, ratio, correction)
        metrics |= sampling | clipping
        uncertain = self._uncertain(inputs)
        losses *= uncertain * self._near_policy(inputs)
        if self.uses_reference and not self.divergence_in_reward:
            divergence = k3(inputs.of_counted(inputs.reference - inputs.log_probs))
            if config.use_bias_correction_kl:
                divergence *= ratio
            losses += self.beta * divergence
            metrics["kl"] = inputs.mean(divergence)
        loss = jnp.sum(self.token_weights(inputs) * inputs.of_counted(losses))
        if config.entropy_coef:
            metrics["policy_loss"] = Metric(loss)
            loss -= config.entropy_coef * _mean_entropy(inputs, uncertain)
        return loss, metrics

    def _uncertain(self, inputs: LossInputs) -> Tokens:
        """Return 1 for tokens whose entropy is large enough to be trained, and 0 for others."""
        if self.config.top_entropy_quantile == 1:
            return jnp.ones_like(inputs.counted)
        values = inputs.values
        entropies = stop_gradient(values.trained_entropies) if self.config.entropy_coef else values.entropies
        every = all_gather(jnp.where(inputs.counted > 0, entropies, jnp.nan).ravel(), *TOKEN_AXES)
        least = jnp.nanquantile(every, 1 - self.config.top_entropy_quantile)
        return jnp.where(entropies >= least, inputs.counted, 0)

    def _near_policy(self, inputs: LossInputs) -> Tokens:
        """Return 0 for tokens that leave the loss with their answer, and 1 for others."""
        if (threshold := self.config.off_policy_mask_threshold) is None:
            return jnp.ones_like(inputs.counted)
        moved = inputs.over_answers(inputs.of_counted(jnp.nan_to_num(inputs.sampler - inputs.now))) / inputs.lengths
        return ((inputs.advantages >= 0) | (moved <= threshold)).astype(inputs.counted.dtype)

    def _correct_sampling(self, inputs: LossInputs) -> tuple[Tokens, dict[str, Metric]]:
        """Return weights that correct for differences between sampling and training, and their metrics.

        A token without a log-probability of sampling has the ratio 1.
        """
        level, _, bound = self.config.importance_sampling_mode.partition("_")
        low, high = self.config.importance_sampling_min, self.config.importance_sampling_max
        sampled = inputs.counted * jnp.isfinite(inputs.sampler)
        difference = stop_gradient(jnp.where(sampled > 0, inputs.old - inputs.sampler, 0))
        ratio = jnp.exp(inputs.over_answers(difference) if level == "sequence" else difference)
        if bound == "mask":
            ratio = jnp.where((ratio >= low) & (ratio <= high), ratio, 0)  # which may be infinite
        elif bound == "truncate":
            ratio = jnp.clip(ratio, low, high)
        metrics = {
            "sampling_logp_difference/mean": Metric(jnp.abs(difference), sampled),
            "sampling_logp_difference/signed_mean": Metric(-difference, sampled),
            "importance_sampling_ratio/mean": (
                inputs.mean_of_answers(ratio) if level == "sequence" else Metric(sampled * ratio, sampled)
            ),
        }
        weights = jnp.ones_like(inputs.counted) if level == "none" else ratio
        return weights, {f"sampling/{name}": metric for name, metric in metrics.items()}


def _mean_entropy(inputs: LossInputs, uncertain: Tokens) -> Float[Array, ""]:
    """Return the micro-batch's part of the mean entropy over the step's tokens, of which some may be left out."""
    assert inputs.rollouts.mean_weight is not None
    trained = inputs.counted * uncertain
    share = psum(inputs.counted.sum(), *TOKEN_AXES) / jnp.maximum(psum(trained.sum(), *TOKEN_AXES), 1)
    return jnp.sum(inputs.rollouts.mean_weight * trained * inputs.values.trained_entropies) * share


class GRPO(PolicyGradient):
    """Means over each answer's tokens, then over answers (arXiv 2402.03300)."""

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number of answers."""
        return counts.answers

    def token_weights(self, inputs: LossInputs) -> Tokens:
        """Return 1 over the answer's length."""
        return inputs.counted / inputs.lengths


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

    def token_weights(self, inputs: LossInputs) -> Tokens:
        """Return 1 over the tokens of the micro-batch."""
        return inputs.counted / jnp.maximum(psum(inputs.counted.sum(), *TOKEN_AXES), 1)


class GSPO(GRPO):
    """GRPO with the ratio of an answer, the geometric mean of its tokens' ratios (arXiv 2507.18071)."""

    by_answer = True


class CISPO(DAPO):
    """Log-probabilities weighted by capped ratios without a gradient, so that no token is left out (2506.13585)."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return 0 and the cap of the ratios."""
        return 0.0, 5.0 if self.config.epsilon_high is None else self.config.epsilon_high

    def policy_losses(self, inputs: LossInputs, ratio: Tokens, correction: Tokens) -> tuple[Tokens, dict[str, Metric]]:
        """Return the losses of tokens without the divergence, and the share of capped ratios of good answers."""
        _, cap = self.bounds
        losses = weighted_log_probs(jnp.minimum(ratio, cap), inputs.advantages, inputs.log_probs)
        return losses * correction, {"cispo_clip_ratio": inputs.mean((ratio > cap) & (inputs.advantages > 0))}


class SAPO(GRPO):
    """Ratios through a sigmoid, whose gradient falls off around 1, in place of clipped ones (arXiv 2511.20347)."""

    Settings = SAPOSettings

    def policy_losses(self, inputs: LossInputs, ratio: Tokens, correction: Tokens) -> tuple[Tokens, dict[str, Metric]]:
        """Return the losses of tokens without the divergence; nothing is clipped."""
        good = inputs.advantages > 0
        sharpness = jnp.where(good, self.config.sapo_temperature_pos, self.config.sapo_temperature_neg)
        losses = -jax.nn.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * inputs.advantages
        return losses * correction, {}


class LUSPO(GSPO):
    """GSPO with answers weighted by their length, so that no token of a long one counts less (arXiv 2602.05261)."""

    def token_weights(self, inputs: LossInputs) -> Tokens:
        """Return 1 for each token of an answer."""
        return inputs.counted


class VESPO(DAPO):
    """Log-probabilities weighted by e^λ · w^k · e^(−λw) of the answers' ratios w, which favors those near 1."""

    Settings = VESPOSettings

    def policy_losses(self, inputs: LossInputs, ratio: Tokens, correction: Tokens) -> tuple[Tokens, dict[str, Metric]]:
        """Return the losses of tokens without the divergence, and the answers' mean weight.

        Weights are of ratios to the probabilities of sampling.
        """
        config, least, most = self.config, math.log(1e-8), 20.0
        sampled = jnp.clip(jnp.log(correction), least, most)
        tokens = inputs.of_counted(jnp.clip(stop_gradient(inputs.log_ratio), -most, most) + sampled)
        log_ratio = jnp.clip(inputs.over_answers(tokens), least, most)
        good = inputs.advantages >= 0
        k = jnp.where(good, config.vespo_k_pos, config.vespo_k_neg)
        slope = jnp.where(good, config.vespo_lambda_pos, config.vespo_lambda_neg)
        weights = jnp.exp(slope + k * log_ratio - slope * jnp.exp(log_ratio))
        losses = -inputs.advantages * inputs.log_probs * weights
        return losses, {"vespo/phi_seq_mean": inputs.mean_of_answers(weights)}


class RLOO(GRPO):
    """REINFORCE with the mean of the other answers as the baseline (arXiv 2402.14740); ratios are of whole answers."""

    Settings = RLOOSettings
    generations = 2
    by_answer = divergence_in_reward = True

    def advantages(self, rewards: Rewards) -> Values:
        """Return the rewards, with the divergence, relative to the mean of the others."""
        values = leave_one_out(self.reward(rewards))
        if self.config.normalize_advantages:
            values = (values - mean(values)) / (deviation(values) + EPSILON)
        return values

    def ratio(self, inputs: LossInputs) -> Tokens:
        """Return the ratio of the answer, the product of its tokens'."""
        return jnp.exp(inputs.over_answers(inputs.log_ratio))
