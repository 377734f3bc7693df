"""Configuration of the objective, under TRL's names."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from jaxglue.data.config import AnswerTask, Columns, LabelTask
from jaxglue.objectives.objective import OBJECTIVES, Objective
from jaxglue.settings.config import Alias, Choices, Config, NonNegativeFloat, PositiveFloat, PositiveInt, Range

LossType = Literal["sigmoid", "hinge", "robust", "exo_pair", "nca_pair", "apo_zero", "apo_down", "sigmoid_norm"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Config):
    """The loss that training minimizes."""

    objective: Annotated[str, Choices(OBJECTIVES), Alias("rl")] = "sft"
    """Supervised cross-entropy, or a loss of preferred and other answers: DPO (arXiv 2305.18290), IPO (2310.12036),
    KTO (2402.01306, rows with a label), ORPO (2403.07691), SimPO (2405.14734), or a reward model's (Bradley-Terry);
    or classify, the labels of documents;
    or of answers that the model writes and rewards judge: GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476),
    BNPO, GSPO (2507.18071), CISPO (2506.13585), SAPO (2511.20347), LUSPO (2602.05261), VESPO,
    RLOO (2402.14740); or distill, the divergence from a teacher on the
    model's answers (2306.13649)."""
    loss_type: Annotated[LossType, Alias("dpo_loss_type")] = "sigmoid"
    """Form of DPO's loss: sigmoid; sigmoid_norm, of log-probabilities for each token; or another of TRL's."""
    beta: Annotated[NonNegativeFloat, Alias("pref_beta", "rl_beta", "dpo_beta", "orpo_alpha")] | None = None
    """Strength of the tie to the reference; IPO's τ, ORPO's λ, the scale of SimPO's rewards; of GRPO and its kin the
    weight of the divergence. By default 0.1, of RLOO 0.05, of GRPO and its kin 0, which computes no reference. In
    distillation 0 is the forward divergence, 1 the reverse, the default, and between lie Jensen and Shannon's."""
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
    num_labels: PositiveInt = 2
    """Labels of a classifier; rows have a `label` from 0."""
    problem_type: Literal["single_label_classification", "multi_label_classification"] = "single_label_classification"
    """Each document has one label, or several: rows have `labels`, a list with 1 or 0 for each."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's rewards, which centers them on 0 (arXiv 2312.09244); 0.01 is usual."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of answers written in training, and of their log-probabilities in the loss."""
    epsilon_low: Annotated[NonNegativeFloat, Alias("clip_ratio_low", "cliprange")] = 0.2
    """Clip ratios of probabilities below 1 - epsilon_low (TRL's epsilon)."""
    epsilon_high: Annotated[NonNegativeFloat, Alias("clip_ratio_high")] | None = None
    """Clip them above 1 + epsilon_high; by default epsilon_low. CISPO's is the cap itself, by default 5."""
    delta: PositiveFloat | None = None
    """Cap of the unclipped ratio, which bounds losses of bad answers (two-sided clipping, arXiv 2505.07291)."""
    use_bias_correction_kl: bool = True
    """Multiply the divergence by the ratio of probabilities, so that its gradient is the reverse divergence's."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of their group, or of all; or not at all."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order in which several rewards are weighted and summed, and normalized."""
    normalize_advantages: bool = False
    """Normalize RLOO's advantages over all answers."""
    mask_truncated_completions: bool = False
    """Leave answers that reached their longest length out of the loss; their rewards stay in their group."""
    top_entropy_quantile: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Share of the tokens, those of the largest entropy, on which the policy is trained (arXiv 2506.01939)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the tokens' mean entropy in the loss, which raises it: answers to a prompt stay different."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Leave bad answers out whose tokens have become less probable than this divergence, in nats a token."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """Sharpness of SAPO's sigmoid in good answers."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """Sharpness in other answers."""
    vespo_k_pos: NonNegativeFloat = 2.0
    """Power of the ratio in VESPO's weight of good answers."""
    vespo_lambda_pos: PositiveFloat = 3.0
    """Decay of this weight with the ratio."""
    vespo_k_neg: NonNegativeFloat = 3.0
    """Power of the ratio in the weight of bad answers."""
    vespo_lambda_neg: PositiveFloat = 2.0
    """Decay of this weight with the ratio."""
    distill_top_k: PositiveInt | None = None
    """Distinguish so many of the teacher's most likely tokens, and all others together; by default all tokens."""
    importance_sampling_mode: Annotated[
        Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        Alias("vllm_importance_sampling_mode"),
    ] = "token_truncate"
    """Correct for differences between the log-probabilities of sampling and training: weights of tokens or of whole
    answers, truncated to their bounds or 0 outside of them."""
    importance_sampling_max: Annotated[PositiveFloat, Alias("vllm_importance_sampling_clip_max")] = 3.0
    """Largest weight of this correction."""
    importance_sampling_min: Annotated[NonNegativeFloat, Alias("vllm_importance_sampling_clip_min")] = 0.0
    """Smallest weight of this correction."""
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
            if getattr(self, field.name) not in (field.default, _former_default(field.name)):
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
        if self.beta is None:
            object.__setattr__(self, "beta", self.kind.default_beta)
        if self.beta == 0 and not self.kind.needs_rollouts:
            raise ValueError(f"--beta: expected float > 0 for --objective {self.objective}, got 0")
        self.kind.check(self)

    @property
    def kind(self) -> type[Objective]:
        """Return the class of the objective."""
        return OBJECTIVES[self.objective]

    @property
    def columns(self) -> Columns:
        """Return the columns of rows that the objective reads."""
        return self.kind.columns_of(self)

    def make(self) -> Objective:
        """Return the objective with these settings."""
        return self.kind(config=self)

    def task(self, *, shared_prompt: bool, copies: bool = False) -> AnswerTask | LabelTask | None:
        """Return the treatment of preference data or labels; None for texts and chats."""
        answers = self.kind.answers
        if self.kind.classifies:
            single = self.problem_type == "single_label_classification"
            return LabelTask(values=self.num_labels if single else 2)
        return None if answers is None else answers._replace(shared_prompt=shared_prompt, copies=copies)


def _former_default(name: str) -> float | None:
    """Return the default that records of earlier runs hold."""
    return 0.1 if name == "beta" else None


SUPERVISED = ObjectiveConfig().make()
"""The default objective."""
