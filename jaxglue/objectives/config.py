"""Settings of the built-in objectives beside their names, under TRL's names; importing them loads no JAX."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jaxglue.objectives.objective import ObjectiveConfig
from jaxglue.settings.config import Alias, Excludes, NonNegativeFloat, PositiveFloat, PositiveInt, Range

LossType = Literal["sigmoid", "hinge", "robust", "exo_pair", "nca_pair", "apo_zero", "apo_down", "sigmoid_norm"]
_BETA = Alias("pref_beta", "rl_beta", "dpo_beta", "orpo_alpha")
Beta = Annotated[PositiveFloat, _BETA]
Divergence = Annotated[NonNegativeFloat, _BETA]
_BESIDE_ADAPTERS = Excludes(
    "method",
    "it compares with the weights as training begins, of which a run would need a copy",
    lambda method: method == "full",
    when=bool,
    remedy="use --method lora, or --beta 0",
)
Smoothing = Annotated[float, Range(ge=0, lt=0.5), Alias("dpo_label_smoothing")]
_Positive = Annotated[float, Range(gt=0, le=1e6)]
_NonNegative = Annotated[float, Range(ge=0, le=1e6)]
"""Bounds beyond which sums of a loss are no longer finite in float32."""
SupervisedWeight = Annotated[NonNegativeFloat, Alias("pref_ftx", "cpo_alpha")]


@dataclass(frozen=True, kw_only=True)
class BetaSettings(ObjectiveConfig):
    """ORPO."""

    beta: Beta = 0.1
    """Strength of the tie to the reference; IPO's τ, ORPO's λ, the scale of SimPO's rewards."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(BetaSettings):
    """An objective that compares with the model as training begins."""

    reference_cache: Annotated[
        Literal["auto", "on", "off"], Alias("precompute_ref_log_probs", values={True: "on", False: "off"})
    ] = "auto"
    """Compute the reference's log-probabilities once and keep them on disk, or beside every step; auto takes the
    faster, and the disk where the reference is not the frozen weights."""


@dataclass(frozen=True, kw_only=True)
class PairSettings(BetaSettings):
    """Pairs of answers, with a supervised loss beside theirs."""

    rpo_alpha: SupervisedWeight = 0.0
    """Weight of the supervised loss of the preferred answers (RPO, arXiv 2404.19733)."""


@dataclass(frozen=True, kw_only=True)
class IPOSettings(PairSettings, ReferenceSettings):
    """IPO."""

    use_weighting: Annotated[bool, Alias("dpo_use_weighting")] = False
    """Weight a pair by the probabilities that the model gives its answers (WPO, arXiv 2406.11827)."""


@dataclass(frozen=True, kw_only=True)
class SmoothedSettings(PairSettings):
    """Pairs whose order may be wrong."""

    label_smoothing: Smoothing = 0.0
    """Probability that a pair's order is wrong: conservative DPO, or loss_type robust or exo_pair."""


@dataclass(frozen=True, kw_only=True)
class DPOSettings(SmoothedSettings, IPOSettings):
    """DPO."""

    loss_type: Annotated[LossType, Alias("dpo_loss_type")] = "sigmoid"
    """Form of DPO's loss: sigmoid; sigmoid_norm, of log-probabilities for each token; or another of TRL's."""

    def validate(self) -> None:
        """Refuse EXO without smoothing."""
        super().validate()
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError("--loss-type exo_pair needs --label-smoothing above 0, such as 0.001")


@dataclass(frozen=True, kw_only=True)
class SimPOSettings(SmoothedSettings):
    """SimPO."""

    simpo_gamma: NonNegativeFloat = 0.5
    """Margin between the rewards of SimPO's answers."""


@dataclass(frozen=True, kw_only=True)
class KTOSettings(ReferenceSettings):
    """KTO."""

    desirable_weight: Annotated[NonNegativeFloat, Alias("kto_chosen_weight", "kto_desirable_weight")] = 1.0
    """Weight of KTO's good answers."""
    undesirable_weight: Annotated[NonNegativeFloat, Alias("kto_rejected_weight", "kto_undesirable_weight")] = 1.0
    """Weight of KTO's bad answers."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings(ObjectiveConfig):
    """A reward model."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's rewards, which centers them on 0 (arXiv 2312.09244); 0.01 is usual."""


@dataclass(frozen=True, kw_only=True)
class ClassifySettings(ObjectiveConfig):
    """A classifier of documents."""

    num_labels: PositiveInt = 2
    """Labels of a classifier; rows have a `label` from 0."""
    problem_type: Literal["single_label_classification", "multi_label_classification"] = "single_label_classification"
    """Each document has one label, or several: rows have `labels`, a list with 1 or 0 for each."""

    def validate(self) -> None:
        """Refuse one label for all documents, whose loss is 0."""
        super().validate()
        if self.num_labels == 1 and self.problem_type == "single_label_classification":
            raise ValueError("--num-labels 1 leaves nothing to learn: count the labels from 0, so that yes or no are 2")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(ObjectiveConfig):
    """An objective of answers that the model writes in training."""

    temperature: Annotated[float, Range(ge=1e-3, le=1e3)] = 1.0
    """Divides the logits of answers written in training, and of their log-probabilities in the loss."""


@dataclass(frozen=True, kw_only=True)
class DistillSettings(RolloutSettings):
    """Distillation."""

    beta: Annotated[float, Range(ge=0, le=1), _BETA] = 1.0
    """0 is the forward divergence, 1 the reverse, and between lie Jensen and Shannon's."""
    distill_top_k: PositiveInt | None = None
    """Distinguish so many of the teacher's most likely tokens, and all others together; by default all tokens."""
    sft_alpha: Annotated[
        NonNegativeFloat,
        Excludes(
            "lmbda",
            "it weighs the rows' answers",
            lambda share: share == 1,
            remedy="lower it, to 0 for steps on them alone",
        ),
    ] = 0.0
    """Weight of the cross-entropy of the rows' answers beside the divergence, in the steps that --lmbda below 1 takes
    on them."""


@dataclass(frozen=True, kw_only=True)
class SampledSettings(RolloutSettings):
    """Ratios of probabilities of answers written in training."""

    beta: Annotated[_NonNegative, _BETA, _BESIDE_ADAPTERS] = 0.0
    """Weight of the divergence from the reference; 0 computes no reference."""
    mask_truncated_completions: bool = False
    """Leave answers that reached their longest length out of the loss; their rewards stay in their group."""
    importance_sampling_mode: Annotated[
        Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        Alias("vllm_importance_sampling_mode"),
    ] = "token_truncate"
    """Correct for differences between the log-probabilities of sampling and training: weights of tokens or of whole
    answers, truncated to their bounds or 0 outside of them."""
    importance_sampling_max: Annotated[_Positive, Alias("vllm_importance_sampling_clip_max")] = 3.0
    """Largest weight of this correction."""
    importance_sampling_min: Annotated[_NonNegative, Alias("vllm_importance_sampling_clip_min")] = 0.0
    """Smallest weight of this correction."""

    def validate(self) -> None:
        """Refuse bounds in the wrong order."""
        super().validate()
        if self.importance_sampling_min >= self.importance_sampling_max:
            raise ValueError("--importance-sampling-min is not below --importance-sampling-max: lower it")


@dataclass(frozen=True, kw_only=True)
class ClippedSettings(SampledSettings):
    """Clipped ratios."""

    epsilon_low: Annotated[_NonNegative, Alias("clip_ratio_low", "cliprange")] = 0.2
    """Clip ratios of probabilities below 1 - epsilon_low (TRL's epsilon)."""
    epsilon_high: Annotated[_NonNegative, Alias("clip_ratio_high")] | None = None
    """Clip them above 1 + epsilon_high; by default epsilon_low. CISPO's is the cap itself, by default 5."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings(SampledSettings):
    """Answers compared with others to their prompt."""

    use_bias_correction_kl: bool = True
    """Multiply the divergence by the ratio of probabilities, so that its gradient is the reverse divergence's."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of their group, or of all; or not at all."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order in which several rewards are weighted and summed, and normalized."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios of probabilities under the present and the old weights: of each token, or of whole answers, the geometric
    mean of their tokens', as GSPO and LUSPO always have them."""
    top_entropy_quantile: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Share of the tokens, those of the largest entropy, on which the policy is trained (arXiv 2506.01939)."""
    entropy_coef: _NonNegative = 0.0
    """Weight of the tokens' mean entropy in the loss, which raises it: answers to a prompt stay different."""
    off_policy_mask_threshold: _Positive | None = None
    """Leave bad answers out whose tokens have become less probable than this divergence, in nats a token."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings(GroupSettings, ClippedSettings):
    """GRPO and its kin."""

    delta: _Positive | None = None
    """Cap of the unclipped ratio, which bounds losses of bad answers (two-sided clipping, arXiv 2505.07291)."""


class Unclipped:
    """Bounds of kinds whose loss clips no ratios; only statistics go by them."""

    epsilon_low: ClassVar[float] = 0.2
    epsilon_high: ClassVar[float | None] = None
    delta: ClassVar[float | None] = None


@dataclass(frozen=True, kw_only=True)
class SAPOSettings(Unclipped, GroupSettings):
    """SAPO."""

    sapo_temperature_pos: _Positive = 1.0
    """Sharpness of SAPO's sigmoid in good answers."""
    sapo_temperature_neg: _Positive = 1.05
    """Sharpness in other answers."""


@dataclass(frozen=True, kw_only=True)
class VESPOSettings(Unclipped, GroupSettings):
    """VESPO."""

    vespo_k_pos: _NonNegative = 2.0
    """Power of the ratio in VESPO's weight of good answers."""
    vespo_lambda_pos: _Positive = 3.0
    """Decay of this weight with the ratio."""
    vespo_k_neg: _NonNegative = 3.0
    """Power of the ratio in the weight of bad answers."""
    vespo_lambda_neg: _Positive = 2.0
    """Decay of this weight with the ratio."""

    def validate(self) -> None:
        """Refuse corrections of whole answers, whose ratios the weights contain."""
        super().validate()
        if self.importance_sampling_mode.startswith("sequence"):
            raise ValueError(
                f"--importance-sampling-mode {self.importance_sampling_mode} is not for --objective vespo, whose "
                "weights are of whole answers: use token_truncate, token_mask or none"
            )


@dataclass(frozen=True, kw_only=True)
class RLOOSettings(ClippedSettings):
    """RLOO."""

    use_bias_correction_kl: ClassVar[bool] = True
    top_entropy_quantile: ClassVar[float] = 1.0
    entropy_coef: ClassVar[float] = 0.0
    off_policy_mask_threshold: ClassVar[float | None] = None
    delta: ClassVar[float | None] = None
    beta: Annotated[_NonNegative, _BETA, _BESIDE_ADAPTERS] = 0.05
    """Weight of the divergence from the reference, which is a part of the reward; 0 computes no reference."""
    normalize_advantages: bool = False
    """Normalize RLOO's advantages over all answers."""


SUPERVISED = ObjectiveConfig().make()
"""The default objective."""
