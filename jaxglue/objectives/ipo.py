"""Identity preference optimization (arXiv 2310.12036)."""

from jaxglue.objectives.answers import PairObjective, Pairs, Values


class IPO(PairObjective):
    """IPO's losses of log-probabilities for each token, as its authors compute them."""

    settings = ("beta", "rpo_alpha", "use_weighting")
    needs_reference = True

    def losses(self, pairs: Pairs) -> Values:
        """Return the pairs' losses."""
        return (pairs.mean_difference - 1 / (2 * self.beta)) ** 2
