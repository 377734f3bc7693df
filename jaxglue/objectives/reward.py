"""Reward models: Bradley-Terry losses of the scores of two answers."""

from jax.nn import log_sigmoid

from jaxglue.data.batch import CHOSEN, REJECTED, Answers, Batch, sum_parts
from jaxglue.data.config import AnswerTask
from jaxglue.data.formats import PAIR_COLUMNS
from jaxglue.objectives.answers import AnswerObjective, Values
from jaxglue.objectives.config import RewardSettings
from jaxglue.objectives.objective import TargetValues
from jaxglue.objectives.scores import SCORES_EXCLUDE


class BradleyTerry(AnswerObjective):
    """Bradley-Terry losses of scores, with the squared sums that center them (arXiv 2312.09244)."""

    Settings = RewardSettings
    answers = AnswerTask(scored=True)
    columns = PAIR_COLUMNS
    trains_scores = True
    excludes = SCORES_EXCLUDE
    learning_rates = {"lora": 1e-4, "full": 1e-5}  # noqa: RUF012 - with adapters TRL's

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the metrics, TRL's."""
        return ("mean_reward", "accuracy", "margin")

    @property
    def title(self) -> str:
        """Return the objective's name in the plan's panel."""
        return "reward model, a score of each answer's last token"

    def units(self, values: TargetValues, batch: Batch, answers: Answers) -> tuple[Values, list[Values]]:
        """Return the losses of pairs, and their metrics."""
        sums = sum_parts(values.scores, answers)
        chosen, rejected = sums[..., CHOSEN], sums[..., REJECTED]
        losses = -log_sigmoid(chosen - rejected - batch.columns["margin"])
        if weight := self.config.center_rewards_coefficient:
            losses += weight * (chosen + rejected) ** 2
        return losses, [(chosen + rejected) / 2, (chosen > rejected) * 1.0, chosen - rejected]
