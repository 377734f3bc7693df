"""Set-up of a run: everything that is read, checked and decided before weights are loaded."""

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.prepare import PreparedData, prepare_data
from jaxglue.data.progress import DataProgress
from jaxglue.data.stream import StreamIterator
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.hf.adapter import Adapter, warn_of_adapter_inside
from jaxglue.hf.hub import model_path
from jaxglue.hf.loading import check_weights
from jaxglue.models.config import DecoderConfig
from jaxglue.objectives.policy_gradient import RolloutObjective
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token
from jaxglue.planner.workload import Workload, sample_lengths
from jaxglue.rl.loop import RolloutSteps
from jaxglue.rl.prompts import PromptDataset, PromptReport, read_prompts
from jaxglue.rl.rewards import Judge
from jaxglue.sharding.mesh import MeshShape, mesh_of, process_batch_shard
from jaxglue.training.checks import warn_of_peft, why_prompts_are_copied
from jaxglue.training.config import RunConfig, TrainConfig
from jaxglue.training.initial_adapter import read_initial_adapter
from jaxglue.training.mesh_choice import agree_on_mesh
from jaxglue.training.optimizer import warmup_steps
from jaxglue.training.reference_choice import runs_in_steps
from jaxglue.training.remat import RematChoice
from jaxglue.training.trackers import check_trackers
from jaxglue.training.vocabulary import Vocabulary, read_vocabulary, run_stops
from jaxglue.training.workload import read_architecture, read_teacher, settle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model to train, in which everything is settled that can be before weights are loaded."""

    config: TrainConfig
    """Settings as a run records them: batch size over all devices, length of rows, and adapters."""
    vocabulary: Vocabulary
    stops: frozenset[int]
    """Tokens at which the trained model's answers end."""
    workload: Workload
    remat: RematChoice
    total_steps: int
    """Optimizer steps, by which the learning rate is scheduled."""
    adapter: Adapter | None = None
    """To train on from."""

    @property
    def model(self) -> DecoderConfig:
        """Return the model's architecture."""
        return self.workload.config

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the run's tokenizer."""
        return self.vocabulary.tokenizer

    @property
    def base(self) -> DecoderConfig:
        """Return the base's architecture."""
        return replace(self.model, vocab_size=self.vocabulary.base_size)

    @property
    def mesh(self) -> MeshShape:
        """Return the shape of the mesh."""
        return self.workload.mesh

    @property
    def caches_reference(self) -> bool:
        """Tell whether the reference's log-probabilities are computed once, before training."""
        return self.config.objective.kind.needs_reference and not self.workload.reference


@dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """A model and the data to train it on."""

    data: PreparedData
    batches: BatchIterator | StreamIterator | RolloutSteps
    eval_batches: EvalBatches | None

    @property
    def rollouts(self) -> RolloutSteps | None:
        """Return the steps on answers that the model writes in training; None for other data."""
        return self.batches if isinstance(self.batches, RolloutSteps) else None

    @property
    def flops_per_token(self) -> float:
        """Return a token's FLOPs of forward and backward over the training documents."""
        full = self.config.model.method == "full"
        keys = mean_visible_keys(self.data.train.document_lengths)
        return training_flops_per_token(self.model, visible_keys=keys, weight_gradients=full)


def resolve(config: TrainConfig, processes: Processes = SINGLE_PROCESS, columns: Columns = NO_COLUMNS) -> Run:
    """Read and check model folder, tokenizer and data, and choose mesh and plan; load no weights.

    Args:
        config: of the run.
        processes: of the run; process 0 tokenizes, the others read its cache.
        columns: of the rows, beside those that the objective reads.

    Raises:
        ValueError: bad model folder, data or settings; names the file and the remedy.
    """
    check_trackers(config.run.trackers)
    config, model, vocabulary, adapter = _read_model(config, processes)
    with processes.main_process_first():
        progress = DataProgress() if processes.is_main else None
        data = _read_data(config, model, vocabulary, progress, columns)
    lengths = sample_lengths(data.train.document_lengths)
    planned = replace(config, run=_with_micro_batches(config, data))
    workload, remat = agree_on_mesh(planned, model, lengths, processes, _expected_steps(planned, data))
    batches: BatchIterator | StreamIterator | RolloutSteps
    if config.objective.kind.needs_rollouts:
        found = data, processes, vocabulary.tokenizer, workload.mesh.devices
        batches, eval_batches = _make_rollouts(config, model, *found), None
        total_steps = config.run.steps or config.run.epochs * batches.steps_per_epoch
    else:
        batches, eval_batches = _make_batches(config, data, workload.mesh)
        total_steps = config.run.steps or batches.total_steps or 0
    if processes.is_main and 0 < total_steps <= (rise := warmup_steps(config.optimizer, total_steps)):
        _log.warning(
            "the learning rate rises over %d warm-up steps, and the run has %d: it never reaches %g; lower "
            "--warmup-steps, or train longer",
            *(rise, total_steps, config.optimizer.learning_rate),
        )
    if config.objective.kind.needs_reference:
        frozen, epochs = config.model.method == "lora" and adapter is None, total_steps / batches.steps_per_epoch
        in_steps = runs_in_steps(config, workload, remat, epochs=epochs, frozen=frozen, processes=processes)
        workload = replace(workload, reference=in_steps)
    return Run(
        config=config,
        vocabulary=vocabulary,
        stops=run_stops(config, vocabulary.tokenizer),
        data=data,
        workload=workload,
        remat=remat,
        batches=batches,
        eval_batches=eval_batches,
        total_steps=total_steps,
        adapter=adapter,
    )


def resolve_model(config: TrainConfig) -> Setup:
    """Read and check model folder and tokenizer, and choose a plan for full rows; load no weights.

    Args:
        config: of which the data are not read.

    Raises:
        ValueError: bad model folder or settings; names the file and the remedy.
    """
    config, model, vocabulary, adapter = _read_model(config, SINGLE_PROCESS)
    assert config.run.steps is not None
    workload, remat = agree_on_mesh(config, model, (), SINGLE_PROCESS, config.run.steps, has_data=False)
    return Setup(
        config=config,
        vocabulary=vocabulary,
        stops=run_stops(config, vocabulary.tokenizer),
        workload=workload,
        remat=remat,
        total_steps=config.run.steps,
        adapter=adapter,
    )


def _read_model(
    config: TrainConfig, processes: Processes
) -> tuple[TrainConfig, DecoderConfig, Vocabulary, Adapter | None]:
    """Return the settled configuration, the architecture, the vocabulary, and the adapter to train on from."""
    folder = config.model.folder
    base = read_architecture(config, folder)
    adapter = read_initial_adapter(config, base)
    base = adapter.adapted(base) if adapter else _untied_by_head(config, base)
    if not config.model.random_weights:
        check_weights(folder, base)
    vocabulary = read_vocabulary(folder, config.model.new_tokens, base, adapter, config.model.tokenizer)
    config = settle(config, base, devices=jax.device_count(), adapter=adapter, vocabulary=vocabulary)
    if processes.is_main:
        warn_of_peft(config, base)
        warn_of_adapter_inside(folder, config.model.adapter)
    return config, replace(base, vocab_size=vocabulary.size), vocabulary, adapter


def _untied_by_head(config: TrainConfig, base: DecoderConfig) -> DecoderConfig:
    """Return the architecture of a base whose output projection gets an adapter, and with it is no longer tied."""
    head = config.model.method == "lora" and "lm_head" in config.lora.vocabulary_targets
    if head and base.tie_word_embeddings and config.model.random_weights:
        raise ValueError(
            "--targets lm_head needs the projection apart from the embedding, and --random-weights draws them as one: "
            "leave one of them out"
        )
    return base.untied if head and base.tie_word_embeddings else base


def _read_data(
    config: TrainConfig,
    model: DecoderConfig,
    vocabulary: Vocabulary,
    progress: DataProgress | None,
    columns: Columns = NO_COLUMNS,
) -> PreparedData:
    """Read and tokenize the data, or the prompts that are answered in training."""
    if config.objective.kind.needs_rollouts:
        answer, limit = config.rollouts.max_completion_length, config.data.row_tokens
        sizes: dict[str, Any] = {"answer": answer, "limit": limit}
        system = config.rollouts.teacher_system
        prompts = read_prompts(config.data, vocabulary.tokenizer, **sizes, teacher_system=system)
        held_out = None
        if config.data.eval_data:
            held_out = read_prompts(config.data, vocabulary.tokenizer, **sizes, held_out=True)
        return PreparedData(train=prompts, eval=held_out, report=PromptReport(prompts, held_out))
    shared = not why_prompts_are_copied(config, model)
    task = config.objective.task(shared_prompt=shared, copies=model.delta is not None)
    columns = {**config.objective.columns, **columns}
    return prepare_data(config.data, vocabulary.tokenizer, model.vocab_size, progress, task, columns)


def _check_teacher(config: TrainConfig, model: DecoderConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError for a teacher of another vocabulary."""
    name = config.rollouts.teacher
    assert name is not None
    rows = read_teacher(config).vocab_size
    tokens, own = load_tokenizer(model_path(name, weights=False)).get_vocab(), tokenizer.get_vocab()
    if tokens != own or rows != model.vocab_size:
        differing = f"{len(set(tokens.items()) ^ set(own.items())):,} tokens differ" if tokens != own else "same tokens"
        raise ValueError(
            f"--teacher {name} has another vocabulary ({differing}; rows of its embedding: {rows:,}, of the student's "
            f"{model.vocab_size:,}): distributions over one vocabulary are compared"
        )


def _make_rollouts(
    config: TrainConfig,
    model: DecoderConfig,
    data: PreparedData,
    processes: Processes,
    tokenizer: "PreTrainedTokenizerBase",
    devices: int,
) -> RolloutSteps:
    """Return the steps on answers that the model writes; their rewards are imported here, in processes of their own."""
    name = config.objective.objective
    if processes.count > 1:
        raise ValueError(f"--objective {name} runs in one process yet: start one")
    if config.objective.kind.needs_teacher and devices > 1:
        raise ValueError(
            f"--objective {name} is for one GPU yet, and there are {devices}: choose one with CUDA_VISIBLE_DEVICES"
        )
    objective, dataset, held_out = config.objective.make(), data.train, data.eval
    assert isinstance(objective, RolloutObjective) and isinstance(dataset, PromptDataset)
    assert held_out is None or isinstance(held_out, PromptDataset)
    if config.rollouts.teacher not in (None, "base"):
        _check_teacher(config, model, tokenizer)
    judge = Judge(config.rollouts)
    steps = RolloutSteps(
        dataset,
        objective,
        config.rollouts,
        judge,
        seq_len=config.data.row_tokens,
        batch_size=config.run.batch_size,
        seed=config.data.seed,
        folder=config.run.output,
        shared=not why_prompts_are_copied(config, model),
        copies=model.delta is not None,
        held_out=held_out,
    )
    try:
        judge.check({name for prompt in dataset.prompts for name in prompt.columns})
    except BaseException:
        judge.close()
        raise
    return steps


def _expected_steps(config: TrainConfig, data: PreparedData) -> int:
    """Return the run's optimizer steps, about: as if every row were full."""
    run, tokens = config.run, int(data.train.document_lengths.sum())
    row = config.data.row_tokens * run.batch_size * run.gradient_accumulation_steps
    return run.steps or max(1, -(-run.epochs * tokens // row))


def _with_micro_batches(config: TrainConfig, data: PreparedData) -> RunConfig:
    """Return the run's settings with the micro-batches of a step of documents, about, and at least two: most have."""
    run, count = config.run, config.run.documents_per_step
    if count is None:
        return run
    rows = count * float(data.train.document_lengths.mean()) / config.data.row_tokens
    count = max(2, math.ceil(rows / run.batch_size))
    return replace(run, gradient_accumulation_steps=count, documents_per_step=None)


def _make_batches(
    config: TrainConfig, data: PreparedData, mesh: MeshShape
) -> tuple[BatchIterator | StreamIterator, EvalBatches | None]:
    """Return this process's part of the training batches and of the held-out ones, if there are any."""
    run = config.run
    part, parts = process_batch_shard(mesh_of(mesh), run.batch_size)
    sizes: dict[str, int] = {"batch_size": run.batch_size, "process_index": part, "process_count": parts}
    batches = _training_batches(config, data, sizes)
    if data.eval is None:
        return batches, None
    return batches, EvalBatches(data.eval, seq_len=config.data.row_tokens, max_segments=batches.max_segments, **sizes)


def _training_batches(config: TrainConfig, data: PreparedData, sizes: dict[str, int]) -> BatchIterator | StreamIterator:
    run, sizes = config.run, {**sizes, "gradient_accumulation_steps": config.run.gradient_accumulation_steps}
    if data.stream:
        assert data.window is not None and run.steps is not None
        if run.documents_per_step:
            raise ValueError(
                "--documents-per-step: a stream's steps are of full rows: leave out one of it and --streaming"
            )
        return StreamIterator(data.stream, data.window, steps=run.steps, **sizes)
    epochs = None if run.steps else run.epochs
    order: dict[str, Any] = {"seed": config.data.seed, "epochs": epochs, "documents_per_step": run.documents_per_step}
    return BatchIterator(data.train, seq_len=config.data.row_tokens, **order, **sizes)
