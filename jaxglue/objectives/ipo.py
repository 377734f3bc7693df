"""Identity preference optimization (arXiv 2310.12036)."""

from jaxglue.objectives.answers import PairObjective, Pairs, Values
from jaxglue.objectives.config import IPOSettings


class IPO(PairObjective):
    """IPO's losses of log-probabilities for each token, as its authors compute them."""

    Settings = IPOSettings
    needs_reference = True

    def losses(self, pairs: Pairs) -> Values:
        """Return the pairs' losses."""
        return (pairs.mean_difference - 1 / (2 * self.beta)) ** 2
