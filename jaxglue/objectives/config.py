"""Configuration of the objective, under TRL's names."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from jaxglue.config import Alias, Choices, Config, NonNegativeFloat, PositiveFloat, Range
from jaxglue.data.config import AnswerTask
from jaxglue.objectives.objective import OBJECTIVES, Objective

LossType = Literal["sigmoid", "hinge", "robust", "exo_pair", "nca_pair", "apo_zero", "apo_down", "sigmoid_norm"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Config):
    """What training minimizes."""

    objective: Annotated[str, Choices(OBJECTIVES), Alias("rl")] = "sft"
    """Supervised cross-entropy, or a loss of preferred and other answers: DPO (arXiv 2305.18290), IPO (2310.12036),
    KTO (2402.01306, rows with a label), ORPO (2403.07691), SimPO (2405.14734), or a reward model's (Bradley-Terry)."""
    loss_type: Annotated[LossType, Alias("dpo_loss_type")] = "sigmoid"
    """Form of DPO's loss: sigmoid; sigmoid_norm, of log-probabilities for each token; or another of TRL's."""
    beta: Annotated[PositiveFloat, Alias("pref_beta", "rl_beta", "dpo_beta", "orpo_alpha")] = 0.1
    """Strength of the tie to the reference; IPO's τ, ORPO's λ, the scale of SimPO's rewards."""
    label_smoothing: Annotated[float, Range(ge=0, lt=0.5), Alias("dpo_label_smoothing")] = 0.0
    """Probability that a pair's order is wrong: conservative DPO, or loss_type robust or exo_pair."""
    rpo_alpha: Annotated[NonNegativeFloat, Alias("pref_ftx", "cpo_alpha")] = 0.0
    """Weight of the supervised loss of the preferred answers (RPO, arXiv 2404.19733)."""
    use_weighting: Annotated[bool, Alias("dpo_use_weighting")] = False
    """Weight a pair by the probabilities that the model gives its answers (WPO, arXiv 2406.11827)."""
    simpo_gamma: NonNegativeFloat = 0.5
    """Margin between the rewards of SimPO's answers."""
    desirable_weight: Annotated[NonNegativeFloat, Alias("kto_chosen_weight", "kto_desirable_weight")] = 1.0
    """Weight of KTO's good answers."""
    undesirable_weight: Annotated[NonNegativeFloat, Alias("kto_rejected_weight", "kto_undesirable_weight")] = 1.0
    """Weight of KTO's bad answers."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's rewards, which centers them on 0 (arXiv 2312.09244); 0.01 is usual."""
    reference_cache: Annotated[
        Literal["auto", "on", "off"], Alias("precompute_ref_log_probs", values={True: "on", False: "off"})
    ] = "auto"
    """Compute the reference's log-probabilities once and keep them on disk, or beside every step; auto takes the
    faster, and the disk where the reference is not the frozen weights."""

    def validate(self) -> None:
        """Refuse settings that the objective does not read."""
        for field in fields(ObjectiveConfig):
            if field.name in ("objective", "reference_cache") or field.name in self.kind.settings:
                continue
            if getattr(self, field.name) != field.default:
                readers = " or ".join(name for name, kind in OBJECTIVES.items() if field.name in kind.settings)
                flag = field.name.replace("_", "-")
                raise ValueError(
                    f"--{flag} is for --objective {readers}, not {self.objective}: name the objective, or leave it out"
                )
        if self.reference_cache == "on" and not self.kind.needs_reference:
            *names, last = (name for name, kind in OBJECTIVES.items() if kind.needs_reference)
            raise ValueError(
                f"--reference-cache on is for --objective {', '.join(names)} or {last}, not {self.objective}: "
                "leave it out"
            )
        self.kind.check(self)

    @property
    def kind(self) -> type[Objective]:
        """Return the class of the objective."""
        return OBJECTIVES[self.objective]

    def make(self) -> Objective:
        """Return the objective with these settings."""
        return self.kind(config=self)

    def task(self, *, shared_prompt: bool) -> AnswerTask | None:
        """Return the treatment of preference data; None for texts and chats."""
        answers = self.kind.answers
        return None if answers is None else answers._replace(shared_prompt=shared_prompt)


SUPERVISED = ObjectiveConfig().make()
"""The default objective."""
