"""Where a run's rows come from: documents, or prompts that the model answers in training."""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

from jaxglue.data.config import Columns
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.prepare import PreparedData, image_rules, prepare_data, read_vision
from jaxglue.data.progress import DataProgress
from jaxglue.data.report import trained_tokens
from jaxglue.data.stream import StreamIterator
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.distributed import Processes
from jaxglue.hf.hub import model_path
from jaxglue.models.config import DecoderConfig
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.ops.attention.tiles import key_tile
from jaxglue.planner.workload import Workload
from jaxglue.rl.loop import RolloutSteps
from jaxglue.rl.plan import RolloutPlan
from jaxglue.rl.prompts import PromptDataset, PromptReport, read_prompts
from jaxglue.rl.rewards import Judge
from jaxglue.rl.teachers import ServedTeachers
from jaxglue.sharding.mesh import MeshShape, mesh_of, process_batch_shard
from jaxglue.training.checks import why_prompts_are_copied
from jaxglue.training.config import TrainConfig
from jaxglue.training.sampling import check_exact
from jaxglue.training.workload import read_teacher
from jaxglue.vision.processor import Processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Batches = BatchIterator | StreamIterator | RolloutSteps


class RowSource(Protocol):
    """Reads the data of a run, and makes its batches."""

    @property
    def why_copied(self) -> str:
        """Return why each answer has a copy of its prompt; empty where answers share it."""

    def read(
        self, tokenizer: "PreTrainedTokenizerBase", progress: DataProgress | None, columns: Columns
    ) -> PreparedData:
        """Read and tokenize the data.

        Args:
            tokenizer: of the run.
            progress: shown while documents are tokenized.
            columns: of the rows, beside those that the objective reads.
        """

    def loss_on(self, data: PreparedData) -> str:
        """Return in words which tokens of the data have loss."""

    def check(self, mesh: MeshShape, processes: Processes, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raise ValueError for devices or processes that the batches are not for."""

    def batches(self, data: PreparedData, workload: Workload) -> tuple[Batches, EvalBatches | None, int]:
        """Return this process's part of the training batches and of the held-out ones, and the run's steps."""


def row_source(config: TrainConfig, model: DecoderConfig) -> RowSource:
    """Return the source of a run's rows, of a model of this architecture."""
    kind = Prompts if config.objective.kind.needs_rollouts else Documents
    return kind(config, model, why_prompts_are_copied(config, model))


@dataclass(frozen=True)
class Documents:
    """Texts, chats and pairs of answers."""

    config: TrainConfig
    model: DecoderConfig
    why_copied: str

    def read(
        self, tokenizer: "PreTrainedTokenizerBase", progress: DataProgress | None, columns: Columns
    ) -> PreparedData:
        """Read documents, and tokenize those that the cache lacks."""
        config, objective = self.config, self.config.objective
        task = objective.task(shared_prompt=not self.why_copied, copies=self.model.recurrent is not None)
        columns = {**objective.columns, **columns}
        processor = read_vision(config.model.folder, tokenizer, **config.data.image_limits)
        return prepare_data(config.data, tokenizer, self.model.vocab_size, progress, task, columns, processor)

    def loss_on(self, data: PreparedData) -> str:
        """Return which tokens of answers or documents have loss, by the sources' formats and settings."""
        objective, report, settings = self.config.objective.kind, data.report, self.config.data
        if objective.trains_scores:
            return "the last token of each document" if objective.classifies else "the scores of answers' last tokens"
        if objective.reads:
            return "what is read: the ends of questions or documents, or texts"
        if objective.answers is not None:
            return "the answers, after their prompts"
        every = sorted({source.loss_on for source in settings.sources})
        kinds = [(one.format, source.loss_on) for one, source in zip(report.sources, settings.sources, strict=False)]
        kinds = kinds or [(name, loss_on) for name in report.format.split(", ") for loss_on in every]
        return ", ".join(dict.fromkeys(trained_tokens(*kind) for kind in kinds))

    def check(self, mesh: MeshShape, processes: Processes, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Accept every mesh and any number of processes."""

    def batches(self, data: PreparedData, workload: Workload) -> tuple[Batches, EvalBatches | None, int]:
        """Return packed rows of the training documents and of held-out ones, if there are any."""
        run, seq_len = self.config.run, self.config.data.row_tokens
        part, parts = process_batch_shard(mesh_of(workload.mesh), run.batch_size)
        if data.stream:
            batches: BatchIterator | StreamIterator = _stream(self.config, data, part, parts)
        else:
            batches = BatchIterator(
                data.train,
                seq_len=seq_len,
                seed=self.config.data.seed,
                epochs=None if run.steps else run.epochs,
                documents_per_step=run.documents_per_step,
                gradient_accumulation_steps=run.gradient_accumulation_steps,
                batch_size=run.batch_size,
                process_index=part,
                process_count=parts,
            )
        total_steps = run.steps or batches.total_steps or 0
        if data.eval is None:
            return batches, None, total_steps
        held_out = EvalBatches(
            data.eval,
            seq_len=seq_len,
            max_segments=batches.max_segments,
            batch_size=run.batch_size,
            process_index=part,
            process_count=parts,
        )
        return batches, held_out, total_steps


def _stream(config: TrainConfig, data: PreparedData, part: int, parts: int) -> StreamIterator:
    run = config.run
    assert data.stream and data.window is not None and run.steps is not None
    if run.documents_per_step:
        raise ValueError("--documents-per-step: a stream's steps are of full rows: leave out one of it and --streaming")
    return StreamIterator(
        data.stream,
        data.window,
        steps=run.steps,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        batch_size=run.batch_size,
        process_index=part,
        process_count=parts,
    )


@dataclass(frozen=True)
class Prompts:
    """Prompts of which the model writes the answers in training."""

    config: TrainConfig
    model: DecoderConfig
    why_copied: str

    @cached_property
    def judge(self) -> Judge:
        """Return what judges the answers, and knows the tools of environments; their files are imported here."""
        return Judge(self.config.rollouts)

    @property
    def tile(self) -> int | None:
        """Return the tokens at whose multiples prompts and answers begin for exact sampling; None without it."""
        on = self.config.rollouts.exact_sampling == "on"
        return key_tile(self.model.layer_kinds[0].head_dim) if on else None

    @cached_property
    def teachers(self) -> ServedTeachers | None:
        """Return the servers whose models judge tokens; they are asked here for the first time."""
        rollouts = self.config.rollouts
        return ServedTeachers(rollouts.teacher_server, rollouts.reward_timeout) if rollouts.teacher_server else None

    def read(
        self, tokenizer: "PreTrainedTokenizerBase", progress: DataProgress | None, columns: Columns
    ) -> PreparedData:
        """Read the prompts, and those that are held out."""
        config, rollouts = self.config, self.config.rollouts
        processor = read_vision(config.model.folder, tokenizer, **config.data.image_limits)
        if rollouts.environment_images and processor is None:
            raise ValueError(f"--environment-images: {config.model.model} sees no images: leave it out")
        read = partial(
            read_prompts,
            config.data,
            tokenizer,
            answer=rollouts.max_completion_length,
            limit=config.data.row_tokens,
            tile=self.tile or 1,
            tools=None if self.judge.kinds is None else self.judge.tools_of,
            images=None if processor is None else partial(image_rules, processor, tokenizer=tokenizer),
            shows=rollouts.environment_images,
        )
        prompts = read(teacher_system=rollouts.teacher_system, answered=rollouts.lmbda < 1)
        held_out = read(held_out=True) if config.data.eval_data else None
        if prompts.reader is not None:
            self._check_images(prompts.reader.rules.processor, tokenizer)
        if self.teachers is not None:
            self.teachers.check(prompts.prompts, tokenizer, None if prompts.reader is None else prompts.reader.rules)
        rules = None if processor is None else image_rules(processor, config.data.sources[0], tokenizer)
        return PreparedData(train=prompts, eval=held_out, report=PromptReport(prompts, held_out), images=rules)

    def _check_images(self, processor: Processor, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Refuse a teacher that sees images otherwise, or whose tower would be the one in training."""
        teacher = self.config.rollouts.teacher
        if teacher == "base" and self.config.model.train_vision == "projector":
            raise ValueError(
                "--teacher base has no projector of its own, where the projector trains as a whole: leave out "
                "--train-vision, or name a folder as the teacher"
            )
        if teacher not in (None, "base"):
            own = read_vision(model_path(teacher, weights=False), tokenizer, **self.config.data.image_limits)
            if own != processor:
                raise ValueError(
                    f"--teacher {teacher} makes other tokens of images than the student, or sees none: distill from a "
                    "model of the same type, or leave out rows with images"
                )

    def loss_on(self, data: PreparedData) -> str:
        """Return that answers have loss."""
        return "answers that the model writes"

    def check(self, mesh: MeshShape, processes: Processes, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Refuse several processes, a teacher on several devices, and one of another vocabulary."""
        name = self.config.objective.objective
        if processes.count > 1:
            raise ValueError(f"--objective {name} runs in one process yet: start one")
        if self.config.objective.kind.needs_teacher and mesh.devices > 1:
            raise ValueError(
                f"--objective {name} is for one GPU yet, and there are {mesh.devices}: choose one with "
                "CUDA_VISIBLE_DEVICES"
            )
        if self.config.rollouts.staleness and mesh.devices > 1:
            raise ValueError(
                f"--staleness is for one GPU, or two of which one samples, and --mesh {mesh} trains on {mesh.devices}: "
                "choose with CUDA_VISIBLE_DEVICES"
            )
        if self.config.rollouts.teacher not in (None, "base"):
            _check_teacher(self.config, self.model, tokenizer)
        if self.tile is not None:
            check_exact(self.config, self.model, mesh)

    def batches(self, data: PreparedData, workload: Workload) -> tuple[Batches, EvalBatches | None, int]:
        """Return the steps on the model's answers; their rewards are imported here, in processes of their own."""
        config, objective, dataset, held_out = self.config, workload.objective, data.train, data.eval
        assert isinstance(objective, RolloutObjective) and isinstance(dataset, PromptDataset)
        assert held_out is None or isinstance(held_out, PromptDataset)
        judge = self.judge
        plan = RolloutPlan(
            dataset=dataset,
            objective=objective,
            config=config.rollouts,
            judge=judge,
            seq_len=config.data.row_tokens,
            batch_size=config.run.batch_size,
            seed=config.data.seed,
            shared=not self.why_copied,
            copies=self.model.recurrent is not None,
            teachers=self.teachers,
            held_out=held_out,
            tile=self.tile,
        )
        steps = RolloutSteps(plan, config.run.output)
        steps.total = config.run.steps or math.ceil(config.run.epochs * steps.steps_per_epoch)
        try:
            judge.check({name for prompt in dataset.prompts for name in prompt.columns})
            judge.check_rows([*dataset.prompts, *(held_out.prompts if held_out else ())])
        except BaseException:
            judge.close()
            raise
        return steps, None, steps.total


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
