"""Simple preference optimization (arXiv 2405.14734)."""

from jaxglue.objectives.answers import PairObjective, Pairs, Values, smoothed


class SimPO(PairObjective):
    """SimPO's losses of log-probabilities for each token, without a reference."""

    settings = ("beta", "label_smoothing", "rpo_alpha", "simpo_gamma")
    by_token = True

    def losses(self, pairs: Pairs) -> Values:
        """Return the pairs' losses."""
        logits = self.beta * (pairs.chosen_mean - pairs.rejected_mean) - self.config.simpo_gamma
        return smoothed(logits, self.config.label_smoothing)
