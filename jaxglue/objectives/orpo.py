"""Odds-ratio preference optimization (arXiv 2403.07691)."""

import jax.numpy as jnp
from jax.nn import log_sigmoid

from jaxglue.data.config import AnswerTask
from jaxglue.objectives.answers import PairObjective, Pairs, Values


class ORPO(PairObjective):
    """ORPO's odds-ratio losses beside the supervised loss of prompts and preferred answers, without a reference."""

    answers = AnswerTask(prompt_loss=True)
    by_token = True

    @property
    def supervised_weight(self) -> float:
        """Return the weight of the supervised loss, 1."""
        return 1.0

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the metrics, TRL's."""
        *pairs, supervised = super().sums
        return (*pairs, "log_odds_ratio", "log_odds_chosen", supervised)

    def losses(self, pairs: Pairs) -> Values:
        """Return the pairs' losses without the supervised part."""
        return -self.beta * log_sigmoid(_log_odds(pairs))

    def measures(self, pairs: Pairs) -> dict[str, Values]:
        """Return the metrics of pairs by name."""
        odds = _log_odds(pairs)
        return super().measures(pairs) | {"log_odds_ratio": log_sigmoid(odds), "log_odds_chosen": odds}


def _log_odds(pairs: Pairs) -> Values:
    """Return the log of the answers' odds ratio, of probabilities for each token."""
    chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
    return chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(x: Values) -> Values:
    """Return log(1 − eˣ) for x ≤ 0 (Mächler 2012); the probability eˣ counts as one rounding below 1 at most.

    Sums of rounded log-probabilities reach 0, where odds are infinite and their gradient is NaN.
    """
    x = jnp.minimum(x, -jnp.finfo(x.dtype).eps)
    near = x > -0.6931472
    safe = jnp.where(near, x, -1.0), jnp.where(near, -1.0, x)
    return jnp.where(near, jnp.log(-jnp.expm1(safe[0])), jnp.log1p(-jnp.exp(safe[1])))
