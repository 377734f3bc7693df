"""A run as it was decided before weights are loaded: its parts, each of which answers one question."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.prepare import PreparedData
from jaxglue.data.stream import StreamIterator
from jaxglue.hf.adapter import Adapter
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import RouterLosses
from jaxglue.models.lora_config import LoraConfig
from jaxglue.objectives.objective import Objective
from jaxglue.ops.choices import Storage
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token
from jaxglue.planner.workload import Workload
from jaxglue.rl.loop import RolloutSteps
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training.config import TrainConfig
from jaxglue.training.optimizer import OptimizerConfig, warmup_steps
from jaxglue.training.remat import Asked, RematChoice
from jaxglue.training.vocabulary import Vocabulary
from jaxglue.vision.images import ImageSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxglue.data.tokenize import FirstRow


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model to start from."""

    name: str
    """As the settings name it."""
    folder: Path
    architecture: DecoderConfig
    """With the rows of its own vocabulary."""
    random: bool
    """Its weights are drawn, not read."""
    seed: int
    """Of weights that are drawn."""
    storage: Storage
    """Of the decoder layers' linear layers, in which weights are loaded."""
    expand_experts: bool
    fp8_experts: bool
    adapter: Adapter | None = None
    """To train on from."""

    @classmethod
    def of(cls, config: TrainConfig, folder: Path, architecture: DecoderConfig, adapter: Adapter | None) -> Self:
        """Return the model in a folder as the settings load it."""
        return cls(
            name=config.model.model,
            folder=folder,
            architecture=architecture,
            random=config.model.random_weights,
            seed=config.data.seed,
            storage=config.model.storage,
            expand_experts=config.model.expand_experts,
            fp8_experts=config.model.fp8_experts,
            adapter=adapter,
        )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The packed rows of a step."""

    batch_size: int
    """Rows of a micro-batch over all devices."""
    seq_len: int
    micro_batches: int
    """In an optimizer step."""
    documents: int | None = None
    """Documents of a step in as many micro-batches as they need; None where `micro_batches` decides."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The optimizer steps of a run."""

    total_steps: int
    optimizer: OptimizerConfig
    """Of each step, with the learning rates over all."""

    @property
    def warmup(self) -> int:
        """Return the steps over which the learning rate rises."""
        return warmup_steps(self.optimizer, self.total_steps)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Terms and noise that a step computes beside the objective's loss."""

    router_losses: RouterLosses | None = None
    neftune_alpha: float = 0.0
    noise_seed: int | None = None
    """Of dropout and NEFTune's noise; None without either."""
    fp8_max_error: float = 0.0
    """Relative error above which a layer is taken out of FP8."""
    image_features: Literal["auto", "disk", "off"] = "off"
    """Where the features of a frozen vision tower are kept, so that it runs once for each image; with `off`, towers run
    in each step."""


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    """How rows become tokens and loss, in words."""

    template: str
    """Of chats, and the tokens that end answers."""
    loss_on: str
    """Tokens that are trained on."""


@dataclass(frozen=True, kw_only=True)
class SpikePlan:
    """Steps whose update is left out."""

    sigma: float
    """Standard deviations above the mean that make a spike."""
    rewinds: bool
    """The weights of the last checkpoint come back, too."""


@dataclass(frozen=True, kw_only=True)
class TeacherPlan:
    """The teacher whose distributions are distilled."""

    folder: str | None
    """Folder or name on the hub; None is the model in training without its adapter."""
    storage: Storage
    """Of its linear layers."""


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """The draft head that is trained for the model."""

    when: Literal["with", "after"]
    """In the model's own steps, or in as many steps after these."""
    lora: LoraConfig | None
    """Rank and scale of adapters on its linear layers; None where all its weights train."""
    optimizer: OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Optimizer steps between what a run reports, measures and saves."""

    log: int
    evaluate: int
    save: int


@dataclass(frozen=True, kw_only=True)
class SamplePrompts:
    """Prompts to answer before and after training, and at each evaluation."""

    prompts: Mapping[str, list[int]]
    """Tokens of each, without an image."""
    tokens: int
    """Of an answer, at most."""
    images: Sequence[ImageSource]
    """Each is shown with each prompt."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The folder of a run, and which weights and files stay in it."""

    folder: Path
    resume: bool
    overwrite: bool
    checkpoints: int
    """Latest ones to keep."""
    keep: Literal["last", "best", "both"]
    """Weights to export."""
    early_stopping: int | None
    """Evaluations in a row without a lower eval loss after which the run ends."""
    trackers: tuple[str, ...]
    profile: int
    """Steps to trace."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model to train, in which everything is settled that can be before weights are loaded."""

    base: Base
    vocabulary: Vocabulary
    stops: frozenset[int]
    """Tokens at which the trained model's answers end."""
    rows: Rows
    schedule: Schedule
    execution: Execution
    asked: Asked
    """Settings of the plan as they were given."""
    workload: Workload
    remat: RematChoice
    teacher: TeacherPlan | None = None
    spikes: SpikePlan | None = None
    """None leaves no update out."""
    draft: DraftPlan | None = None
    recorded: TrainConfig
    """Settings as the run's record has them; for the record alone."""

    @property
    def model(self) -> DecoderConfig:
        """Return the architecture of the model in training."""
        return self.workload.config

    @property
    def lora(self) -> LoraConfig | None:
        """Return the adapters in training; None where all weights train."""
        return self.workload.lora

    @property
    def dtype(self) -> Any:
        """Return the dtype of activations and frozen weights."""
        return self.workload.dtype

    @property
    def objective(self) -> Objective:
        """Return the objective."""
        return self.workload.objective

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the run's tokenizer."""
        return self.vocabulary.tokenizer

    @property
    def mesh(self) -> MeshShape:
        """Return the shape of the mesh."""
        return self.workload.mesh

    @property
    def caches_reference(self) -> bool:
        """Tell whether the reference's log-probabilities are computed once, before training."""
        return self.objective.needs_reference and not self.workload.reference


@dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """A model and the data to train it on."""

    data: PreparedData
    texts: TextPlan
    read_first_row: "Callable[[], FirstRow]"
    """Read the first row of the training data anew, to compare its tokens."""
    why_copied: str
    """Why each answer has a copy of its prompt; empty where answers share it."""
    exact: str | None
    """Whether sampling is exact, and the reason for a choice; None where nothing is sampled."""
    cache: Path
    """Folder of values that later runs may read."""
    batches: BatchIterator | StreamIterator | RolloutSteps
    eval_batches: EvalBatches | None
    cadence: Cadence
    samples: SamplePrompts
    output: Output

    @property
    def rollouts(self) -> RolloutSteps | None:
        """Return the steps on answers that the model writes in training; None for other data."""
        return self.batches if isinstance(self.batches, RolloutSteps) else None

    @property
    def shows_images(self) -> bool:
        """Return whether environments may show images."""
        return self.rollouts is not None and self.rollouts.plan.config.environment_images

    @property
    def epochs(self) -> float:
        """Return how often the steps read each document."""
        return self.schedule.total_steps / self.batches.steps_per_epoch

    @property
    def flops_per_token(self) -> float:
        """Return a token's FLOPs of forward and backward over the training documents."""
        keys = mean_visible_keys(self.data.train.document_lengths)
        trains = self.lora is None
        return training_flops_per_token(
            self.model, visible_keys=keys, weight_gradients=trains, has_logits=not self.objective.reads
        )
