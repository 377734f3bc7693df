"""Losses of preferred and other answers, one value for each pair, as TRL computes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid
from jaxtyping import Array, Float

from jaxglue.objectives.config import ObjectiveConfig

Values = Float[Array, "*U"]


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


def dpo(pairs: Pairs, config: ObjectiveConfig) -> Values:
    """Compute DPO's losses in the form of `loss_type`."""
    logits, smoothing = config.beta * (pairs.chosen_ratio - pairs.rejected_ratio), config.label_smoothing
    chosen, rejected = config.beta * pairs.chosen_ratio, config.beta * pairs.rejected_ratio
    match config.loss_type:
        case "sigmoid_norm":
            return _smoothed(config.beta * pairs.mean_difference, smoothing)
        case "hinge":
            return jax.nn.relu(1 - logits)
        case "robust":
            flipped = smoothing * log_sigmoid(-logits)
            return (flipped - (1 - smoothing) * log_sigmoid(logits)) / (1 - 2 * smoothing)
        case "exo_pair":
            wins = sigmoid(logits) * (log_sigmoid(logits) - jnp.log1p(-smoothing))
            return wins + sigmoid(-logits) * (log_sigmoid(-logits) - jnp.log(smoothing))
        case "nca_pair":
            return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)
        case "apo_zero":
            return 1 - sigmoid(chosen) + sigmoid(rejected)
        case "apo_down":
            return sigmoid(chosen) + 1 - sigmoid(logits)
    return _smoothed(logits, smoothing)


def ipo(pairs: Pairs, config: ObjectiveConfig) -> Values:
    """Compute IPO's losses of log-probabilities for each token, as its authors do."""
    return (pairs.mean_difference - 1 / (2 * config.beta)) ** 2


def orpo(pairs: Pairs, config: ObjectiveConfig) -> Values:
    """Compute ORPO's odds-ratio losses, without the supervised part."""
    return -config.beta * log_sigmoid(log_odds(pairs))


def log_odds(pairs: Pairs) -> Values:
    """Return the log of the answers' odds ratio, of probabilities for each token."""
    chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
    return chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))


def simpo(pairs: Pairs, config: ObjectiveConfig) -> Values:
    """Compute SimPO's losses."""
    logits = config.beta * (pairs.chosen_mean - pairs.rejected_mean) - config.simpo_gamma
    return _smoothed(logits, config.label_smoothing)


def kto(ratio: Values, desirable: Values, kl: Float[Array, ""], config: ObjectiveConfig) -> Values:
    """Compute KTO's losses of answers by log π/π_ref, against the divergence `kl` of the batch."""
    good = config.desirable_weight * (1 - sigmoid(config.beta * (ratio - kl)))
    bad = config.undesirable_weight * (1 - sigmoid(config.beta * (kl - ratio)))
    return jnp.where(desirable > 0, good, bad)


def reward(chosen: Values, rejected: Values, margin: Values | float, config: ObjectiveConfig) -> Values:
    """Compute Bradley-Terry losses of scores, with the squared sums that center them."""
    losses = -log_sigmoid(chosen - rejected - margin)
    if weight := config.center_rewards_coefficient:
        losses += weight * (chosen + rejected) ** 2
    return losses


PAIR_LOSSES = {"dpo": dpo, "ipo": ipo, "orpo": orpo, "simpo": simpo}
"""Losses of pairs by objective."""


def _smoothed(logits: Values, smoothing: float) -> Values:
    if smoothing == 0.0:
        return -log_sigmoid(logits)
    return -log_sigmoid(logits) * (1 - smoothing) - log_sigmoid(-logits) * smoothing


def _log1mexp(x: Values) -> Values:
    """Return log(1 − eˣ) for x < 0 (Mächler 2012)."""
    near = x > -0.6931472
    safe = jnp.where(near, x, -1.0), jnp.where(near, -1.0, x)
    return jnp.where(near, jnp.log(-jnp.expm1(safe[0])), jnp.log1p(-jnp.exp(safe[1])))
