"""Direct preference optimization (arXiv 2305.18290), in TRL's forms."""

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from jaxglue.objectives.answers import PairObjective, Pairs, Values, smoothed
from jaxglue.objectives.config import DPOSettings


class DPO(PairObjective):
    """DPO's losses in the form of `loss_type`."""

    Settings = DPOSettings
    needs_reference = True

    def losses(self, pairs: Pairs) -> Values:
        """Return the pairs' losses."""
        beta, smoothing = self.beta, self.config.label_smoothing
        logits = beta * (pairs.chosen_ratio - pairs.rejected_ratio)
        chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        match self.config.loss_type:
            case "sigmoid_norm":
                return smoothed(beta * pairs.mean_difference, smoothing)
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
        return smoothed(logits, smoothing)
