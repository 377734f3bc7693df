"""Kahneman-Tversky optimization of answers that are labeled good or bad (arXiv 2402.01306)."""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.nn import sigmoid
from jaxtyping import Array, Float

from jaxglue.data.batch import CHOSEN, REJECTED, Answers, Batch, sum_parts
from jaxglue.data.config import AnswerTask
from jaxglue.objectives.answers import AnswerObjective, Values, reference_of
from jaxglue.objectives.config import KTOSettings
from jaxglue.objectives.objective import TargetValues
from jaxglue.ops.collectives import BATCH_AXES, psum

_SUMS = ("rewards/chosen", "logps/chosen", "desirable", "rewards/rejected", "logps/rejected", "kl")


class KTO(AnswerObjective):
    """KTO's losses of answers against the divergence of the micro-batch, over all devices.

    The first answer of a unit is judged; the second, of another prompt, serves the divergence alone.
    """

    Settings = KTOSettings
    answers = AnswerTask(labeled=True)
    needs_reference = True

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums over good and over bad answers."""
        return _SUMS

    @property
    def title(self) -> str:
        """Return the name with β."""
        return f"{self.config.objective}, beta {self.beta:g}"

    def units(self, values: TargetValues, batch: Batch, answers: Answers) -> tuple[Values, list[Values]]:
        """Return the losses of labeled answers, and their metrics' parts."""
        sums, desirable = sum_parts(values.log_probs, answers), answers.desirable
        reference = reference_of(answers, sums)
        unrelated = stop_gradient(answers.used * (sums[..., REJECTED] - reference[..., REJECTED]))
        total, count = (psum(value.sum(), *BATCH_AXES) for value in (unrelated, answers.used))
        kl = jnp.maximum(total / jnp.maximum(count, 1), 0)
        ratio = sums[..., CHOSEN] - reference[..., CHOSEN]
        rewards = self.beta * ratio
        good = [rewards * desirable, sums[..., CHOSEN] * desirable, desirable]
        bad = [rewards * (1 - desirable), sums[..., CHOSEN] * (1 - desirable)]
        return self.losses(ratio, desirable, kl), [*good, *bad, jnp.broadcast_to(kl, ratio.shape)]

    def losses(self, ratio: Values, desirable: Values, kl: Float[Array, ""]) -> Values:
        """Return the losses of answers by log π/π_ref."""
        beta = self.beta
        good = self.config.desirable_weight * (1 - sigmoid(beta * (ratio - kl)))
        bad = self.config.undesirable_weight * (1 - sigmoid(beta * (kl - ratio)))
        return jnp.where(desirable > 0, good, bad)

    def metrics(self, values: Float[Array, " sums"]) -> dict[str, Array]:
        """Return the metrics by TRL's names: means over good and over bad answers."""
        named = super().metrics(values)
        good = named.pop("desirable")
        shares = {"chosen": jnp.maximum(good, 1e-9), "rejected": jnp.maximum(1 - good, 1e-9)}
        named |= {name: named[name] / shares[name.partition("/")[2]] for name in named if name != "kl"}
        return named | {"rewards/margins": named["rewards/chosen"] - named["rewards/rejected"]}
