"""Simple preference optimization (arXiv 2405.14734)."""

from jaxglue.objectives.answers import PairObjective, Pairs, Values, smoothed
from jaxglue.objectives.config import SimPOSettings


class SimPO(PairObjective):
    """SimPO's losses of log-probabilities for each token, without a reference."""

    Settings = SimPOSettings
    by_token = True

    def losses(self, pairs: Pairs) -> Values:
        """Return the pairs' losses."""
        logits = self.beta * (pairs.chosen_mean - pairs.rejected_mean) - self.config.simpo_gamma
        return smoothed(logits, self.config.label_smoothing)
