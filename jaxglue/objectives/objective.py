"""The interface of an objective, its settings, and the registry by name; importing it loads no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from jaxglue.data.config import NO_COLUMNS, AnswerTask, Columns, LabelTask
from jaxglue.parts import Registry
from jaxglue.settings.config import Alias, Choices, Excludes, KindSettings, Requires, plain_fields

if TYPE_CHECKING:
    from jaxtyping import Array, Float
    from transformers import PreTrainedTokenizerBase

    from jaxglue.data.batch import Batch
    from jaxglue.data.reads import ReadTask


OBJECTIVES = Registry["type[Objective]"](
    "objective",
    {
        "sft": "jaxglue.objectives.sft:Supervised",
        "dft": "jaxglue.objectives.dft:Dynamic",
        "dpo": "jaxglue.objectives.dpo:DPO",
        "ipo": "jaxglue.objectives.ipo:IPO",
        "kto": "jaxglue.objectives.kto:KTO",
        "orpo": "jaxglue.objectives.orpo:ORPO",
        "simpo": "jaxglue.objectives.simpo:SimPO",
        "reward": "jaxglue.objectives.reward:BradleyTerry",
        "classify": "jaxglue.objectives.classify:Classification",
        "decide": "jaxglue.objectives.decide:Decisions",
        "decide_head": "jaxglue.objectives.decide:HeadDecisions",
        "embed": "jaxglue.objectives.embed:Embeddings",
        "rerank": "jaxglue.objectives.rerank:Reranker",
        "rerank_score": "jaxglue.objectives.rerank:ScoreReranker",
        "grpo": "jaxglue.objectives.policy_gradient:GRPO",
        "dr_grpo": "jaxglue.objectives.policy_gradient:DrGRPO",
        "dapo": "jaxglue.objectives.policy_gradient:DAPO",
        "bnpo": "jaxglue.objectives.policy_gradient:BNPO",
        "gspo": "jaxglue.objectives.policy_gradient:GSPO",
        "cispo": "jaxglue.objectives.policy_gradient:CISPO",
        "sapo": "jaxglue.objectives.policy_gradient:SAPO",
        "luspo": "jaxglue.objectives.policy_gradient:LUSPO",
        "vespo": "jaxglue.objectives.policy_gradient:VESPO",
        "rloo": "jaxglue.objectives.policy_gradient:RLOO",
        "distill": "jaxglue.objectives.distill:Distillation",
        "distill_tokens": "jaxglue.objectives.distill_tokens:TokenDistillation",
    },
)
"""Every objective, in the order of `--help`."""
_SETTINGS = Registry["type[ObjectiveConfig]"](
    "objective",
    {
        name: f"jaxglue.objectives.{where}"
        for where, names in {
            "reading_config:DecideSettings": ("decide",),
            "reading_config:DecideHeadSettings": ("decide_head",),
            "reading_config:EmbedSettings": ("embed",),
            "reading_config:RerankSettings": ("rerank", "rerank_score"),
            "objective:ObjectiveConfig": ("sft", "dft"),
            "config:DPOSettings": ("dpo",),
            "config:IPOSettings": ("ipo",),
            "config:KTOSettings": ("kto",),
            "config:BetaSettings": ("orpo",),
            "config:SimPOSettings": ("simpo",),
            "config:RewardSettings": ("reward",),
            "config:ClassifySettings": ("classify",),
            "config:PolicyGradientSettings": ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "luspo"),
            "config:SAPOSettings": ("sapo",),
            "config:VESPOSettings": ("vespo",),
            "config:RLOOSettings": ("rloo",),
            "config:DistillSettings": ("distill",),
            "config:RolloutSettings": ("distill_tokens",),
        }.items()
        for name in names
    },
)
"""Settings of the built-in objectives, each its class's `Settings`, where no JAX is loaded for them."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(KindSettings):
    """The loss that training minimizes; its further settings are the objective's own."""

    named_by: ClassVar = "objective"
    objective: Annotated[str, Choices(OBJECTIVES), Alias("rl")] = "sft"
    """Supervised cross-entropy, or dft, which weighs it by the tokens' probabilities (arXiv 2508.05629); or a loss of
    preferred and other answers: DPO (2305.18290), IPO (2310.12036), KTO (2402.01306, rows with a label),
    ORPO (2403.07691), SimPO (2405.14734), or a reward model's (Bradley-Terry);
    or classify, the labels of documents; or decide, typed questions about a state, or decide_head, by a small head;
    embed, texts as vectors; rerank, documents to a query, by yes and no at the head, or rerank_score, by a score;
    or of answers that the model writes and rewards judge: GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476),
    BNPO, GSPO (2507.18071), CISPO (2506.13585), SAPO (2511.20347), LUSPO (2602.05261), VESPO,
    RLOO (2402.14740); or distill, the divergence from a teacher on the
    model's answers (2306.13649), or distill_tokens, by what servers' models say of their tokens."""

    @classmethod
    def settings_of(cls, name: str) -> type[Any]:
        """Return the settings of an objective."""
        return _SETTINGS[name] if name in _SETTINGS else OBJECTIVES[name].Settings

    @property
    def reference_cache(self) -> str:
        """Return when the reference's log-probabilities are computed, of an objective that compares with one."""
        return "auto"

    @property
    def columns(self) -> Columns:
        """Return the columns of rows that the objective reads."""
        return self.make().columns_read

    def task(self, *, shared_prompt: bool, copies: bool = False) -> "AnswerTask | LabelTask | ReadTask | None":
        """Return the treatment of preference data, labels or rows whose parts are read; None for texts and chats."""
        return self.make().task(shared_prompt=shared_prompt, copies=copies)

    @property
    def kind(self) -> "type[Objective]":
        """Return the class of the objective."""
        return OBJECTIVES[self.objective]

    def make(self) -> "Objective":
        """Return the objective with these settings."""
        return self.kind(config=self)


NO_ROLLOUTS = Excludes("rollouts", "it is for answers written in training")


def frozen_vocabulary(reason: str, **conditions: Any) -> tuple[Excludes, ...]:
    """Return the exclusion of every setting that trains embedding or output projection beside adapters.

    Args:
        reason: of all.
        conditions: of `Excludes`.
    """
    paths = {"embed_tokens", "model.embed_tokens", "lm_head"}
    of_adapters = {"unless": lambda settings: settings["method"] == "full", **conditions}
    return (
        *(Excludes(name, reason, **conditions) for name in ("modules_to_save", "trainable_token_indices")),
        Excludes("targets", reason, paths.intersection, remedy="leave embed_tokens and lm_head out", **of_adapters),
        Excludes("new_tokens", reason, **conditions),
    )


_OF_ADAPTERS: dict[str, Any] = {"unless": lambda settings: settings["method"] == "full"}
_BESIDE_REFERENCE = (
    *frozen_vocabulary("it compares with a model without adapters, so embedding and head stay frozen", **_OF_ADAPTERS),
    Excludes(
        "train_vision", "it compares with a model without adapters, so the vision tower is frozen", **_OF_ADAPTERS
    ),
)


class TargetValues(Protocol):
    """Values of a batch's targets under the model, computed through the head when an objective asks for them."""

    @property
    def cross_entropy(self) -> "Float[Array, '']":
        """Return Σ loss weight · cross-entropy, fused with the head."""

    @property
    def log_probs(self) -> "Float[Array, 'B T']":
        """Return the targets' log-probabilities; 0 where the loss weight is."""

    @property
    def alignment(self) -> "Float[Array, 'B T']":
        """Return the targets' log-probabilities less log Σ p² over the vocabulary."""

    @property
    def entropy(self) -> "tuple[Float[Array, ''], Float[Array, '']]":
        """Return Σ entropy of some of the counted tokens, and their number, without a gradient."""

    @property
    def entropies(self) -> "Float[Array, 'B T']":
        """Return entropies over the vocabulary, without a gradient; 0 where the loss weight is."""

    @property
    def trained_entropies(self) -> "Float[Array, 'B T']":
        """Return `entropies` with gradients."""

    def divergences(self, beta: float, top_k: int | None) -> "Float[Array, 'B T']":
        """Return divergences between a teacher's distributions and the model's; 0 where the loss weight is."""

    @property
    def scores(self) -> "Float[Array, 'B T']":
        """Return the tokens' scores under a reward model; 0 where the loss weight is."""

    @property
    def class_scores(self) -> "Float[Array, 'B T C']":
        """Return the tokens' scores under a classifier, one for each label."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Loss of a batch, and what data, planner, engine and training need to know of it; static and hashable.

    `OBJECTIVES.register(name)` makes a subclass an objective: it is the whole of what a new one adds.
    """

    config: Any
    """Its settings, of the class `Settings`."""

    Settings: ClassVar[type[ObjectiveConfig]] = ObjectiveConfig
    """Class of its settings: a dataclass on `ObjectiveConfig`, or on another objective's, without JAX."""
    excludes: ClassVar[tuple[Excludes, ...]] = (
        NO_ROLLOUTS,
        Excludes("fp8_head", "it is for the cross-entropy of --objective sft"),
        Excludes("streaming", "streams are of texts and chats, for --objective sft"),
    )
    """Settings of a run that do not go with it, and why."""
    requires: ClassVar[tuple[Requires, ...]] = ()
    """Settings of a run that it needs, and why."""
    answers: ClassVar[AnswerTask | None] = None
    """Its data: pairs of answers, answers with a label, or pairs to score; None for texts and chats."""
    columns: ClassVar[Columns] = NO_COLUMNS
    """Columns of numbers in its rows, each with the value of rows without it; in `Batch.columns`."""
    supervised: ClassVar[bool] = False
    """The loss is the targets' cross-entropy alone: FP8 heads, streams and accuracies of tokens are for it."""
    needs_reference: ClassVar[bool] = False
    """The loss compares with the model as training begins."""
    needs_rollouts: ClassVar[bool] = False
    """The loss is of answers that the model writes during training."""
    forks: ClassVar[bool] = False
    """Segments of its batches have several continuations of one beginning; follows from the data."""
    needs_teacher: ClassVar[bool] = False
    """The loss is the divergence from a teacher on these answers."""
    trains_scores: ClassVar[bool] = False
    """A reward model or classifier is trained: scores take the place of the output projection."""
    classifies: ClassVar[bool] = False
    """Documents have labels, which are read at their last tokens."""
    reads: ClassVar[bool] = False
    """Parts of rows are read by themselves: `jaxglue.objectives.reading`."""
    two_passes: ClassVar[bool] = False
    """Steps run such rows twice: the loss is of the parts of a whole step."""
    shares_beginning: ClassVar[bool] = True
    """Such parts follow one beginning."""
    learning_rates: ClassVar[Mapping[str, float]] = {"lora": 2e-4, "full": 2e-5}
    """Peak learning rates by training method."""

    def __init_subclass__(cls) -> None:
        if cls.needs_reference and "reference_cache" not in plain_fields(cls.Settings):
            raise TypeError(f"{cls.__name__} needs a reference: let its Settings extend ReferenceSettings")
        if cls.needs_reference:
            cls.excludes = (*cls.excludes, *(each for each in _BESIDE_REFERENCE if each not in cls.excludes))
        cls.forks = cls.answers is not None or cls.needs_rollouts or (cls.reads and cls.shares_beginning)

    @property
    def columns_read(self) -> Columns:
        """Return the columns that it reads with its settings."""
        return self.columns

    def task(self, *, shared_prompt: bool, copies: bool = False) -> "AnswerTask | LabelTask | ReadTask | None":
        """Return the treatment of preference data, labels or rows whose parts are read; None for texts and chats."""
        return None if self.answers is None else self.answers._replace(shared_prompt=shared_prompt, copies=copies)

    @property
    def labels(self) -> int:
        """Return the scores of a token, where these are trained."""
        return 1

    def score_tokens(self, tokenizer: "PreTrainedTokenizerBase", system: str) -> "list[int] | None":
        """Return the tokens whose rows of the output projection new scores begin with; None for random ones."""
        return None

    @property
    def beta(self) -> float:
        """Return the strength of the tie to the reference, of objectives that have one."""
        return self.config.beta

    @property
    def temperature(self) -> float:
        """Return the divisor of the logits of `TargetValues`, but for those of `cross_entropy`."""
        return 1.0

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums that follow the loss's in a result of `__call__`."""
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a result of `__call__`."""
        return (1 + len(self.sums),) if self.sums else ()

    @property
    def title(self) -> str:
        """Return the objective's name with its main settings, for the plan's panel."""
        return self.config.objective

    def __call__(self, values: TargetValues, batch: "Batch") -> "Float[Array, '*sums']":
        """Return Σ loss over this device's rows, or [Σ loss, Σ of each of `sums`].

        A step divides the sums by its units, pairs of answers, or for texts and chats by its target tokens.

        Args:
            values: of the batch's targets.
            batch: with answers where `answers` asks for them, and their reference's log-probabilities.
        """
        raise NotImplementedError

    def loss(self, values: "Float[Array, '*sums']") -> "Float[Array, '']":
        """Return the loss of a result of `__call__`."""
        return values[0] if self.sums else values

    def metrics(self, values: "Float[Array, '*sums']") -> "dict[str, Array]":
        """Return a step's metrics from the results of `__call__` over its micro-batches, summed and divided."""
        return dict(zip(self.sums, values[1:], strict=True)) if self.sums else {}
