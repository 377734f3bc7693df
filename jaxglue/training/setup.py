"""Set-up of a run: everything that is read, checked and decided before weights are loaded."""

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.prepare import PreparedData, prepare_data, read_vision
from jaxglue.data.progress import DataProgress
from jaxglue.data.stream import StreamIterator
from jaxglue.data.tokenize import first_row
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.hf.adapter import warn_of_adapter_inside
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.hub import model_path
from jaxglue.hf.loading import check_weights
from jaxglue.models import with_vision
from jaxglue.models.config import DecoderConfig
from jaxglue.objectives.objective import Objective
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.planner.workload import Workload, sample_lengths
from jaxglue.rl.loop import RolloutSteps
from jaxglue.rl.plan import RolloutPlan
from jaxglue.rl.prompts import PromptDataset, PromptReport, read_prompts
from jaxglue.rl.rewards import Judge
from jaxglue.sharding.mesh import MeshShape, mesh_of, process_batch_shard
from jaxglue.training.checks import warn_of_peft, why_prompts_are_copied
from jaxglue.training.config import RunConfig, TrainConfig
from jaxglue.training.remat import Asked, agree_on_mesh, runs_in_steps
from jaxglue.training.run import (
    Base,
    Cadence,
    Execution,
    Output,
    Rows,
    Run,
    SamplePrompts,
    Schedule,
    Setup,
    SpikePlan,
    TeacherPlan,
)
from jaxglue.training.trackers import check_trackers
from jaxglue.training.vocabulary import Vocabulary, read_vocabulary, run_stops
from jaxglue.training.workload import normalization, read_architecture, read_initial_adapter, read_teacher, settle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_log = logging.getLogger(__name__)


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
    config, model, base, vocabulary = _read_model(config, processes)
    why_copied = why_prompts_are_copied(config, model)
    with processes.main_process_first():
        progress = DataProgress() if processes.is_main else None
        data = _read_data(config, model, vocabulary, progress, columns, shared=not why_copied)
    config, model, base = _with_tower(config, model, base, data)
    lengths = sample_lengths(data.train.document_lengths)
    planned = replace(config, run=_with_micro_batches(config, data))
    workload, remat = agree_on_mesh(planned, model, lengths, processes, _expected_steps(planned, data))
    batches: BatchIterator | StreamIterator | RolloutSteps
    if workload.objective.needs_rollouts:
        devices = workload.mesh.devices
        _check_rollouts(config, model, processes, vocabulary.tokenizer, devices=devices)
        batches, eval_batches = _make_rollouts(config, model, workload.objective, data, shared=not why_copied), None
        total_steps = config.run.steps or config.run.epochs * batches.steps_per_epoch
    else:
        batches, eval_batches = _make_batches(config, data, workload.mesh)
        total_steps = config.run.steps or batches.total_steps or 0
    schedule = Schedule(total_steps=total_steps, optimizer=config.optimizer)
    if processes.is_main and 0 < total_steps <= schedule.warmup:
        _log.warning(
            "the learning rate rises over %d warm-up steps, and the run has %d: it never reaches %g; lower "
            "--warmup-steps, or train longer",
            *(schedule.warmup, total_steps, config.optimizer.learning_rate),
        )
    if workload.objective.needs_reference:
        frozen, epochs = workload.lora is not None and base.adapter is None, total_steps / batches.steps_per_epoch
        in_steps = runs_in_steps(config, workload, remat, epochs=epochs, frozen=frozen, processes=processes)
        workload = replace(workload, reference=in_steps)
    run, preferences = config.run, workload.objective.answers is not None
    evaluate = run.eval_every or batches.steps_per_epoch
    return Run(
        base=base,
        vocabulary=vocabulary,
        stops=run_stops(vocabulary.tokenizer, base.folder, config.model.adapter, config.data.stop_tokens),
        rows=_rows(config),
        schedule=schedule,
        execution=_execution(config, workload, processes),
        asked=Asked.of(config),
        workload=workload,
        remat=remat,
        teacher=_teacher_plan(config),
        spikes=_spike_plan(config),
        recorded=config,
        data=data,
        read_first_row=partial(first_row, config.data, preferences=preferences, images=data.images),
        why_copied=why_copied,
        cache=Path(config.data.cache_dir),
        batches=batches,
        eval_batches=eval_batches,
        cadence=Cadence(log=run.log_every, evaluate=evaluate, save=run.save_every or evaluate),
        samples=SamplePrompts(prompts=run.sample_prompt, tokens=run.sample_tokens, images=run.sample_image),
        output=Output(
            folder=run.output,
            resume=run.resume,
            overwrite=run.overwrite,
            checkpoints=run.keep_checkpoints,
            keep=run.keep,
            early_stopping=run.early_stopping,
            trackers=run.trackers,
            profile=run.profile,
        ),
    )


def resolve_model(config: TrainConfig) -> Setup:
    """Read and check model folder and tokenizer, and choose a plan for full rows; load no weights.

    Args:
        config: of which the data are not read.

    Raises:
        ValueError: bad model folder or settings; names the file and the remedy.
    """
    config, model, base, vocabulary = _read_model(config, SINGLE_PROCESS)
    assert config.run.steps is not None
    workload, remat = agree_on_mesh(config, model, (), SINGLE_PROCESS, config.run.steps, has_data=False)
    return Setup(
        base=base,
        vocabulary=vocabulary,
        stops=run_stops(vocabulary.tokenizer, base.folder, config.model.adapter, config.data.stop_tokens),
        rows=_rows(config),
        schedule=Schedule(total_steps=config.run.steps, optimizer=config.optimizer),
        execution=_execution(config, workload, SINGLE_PROCESS),
        asked=Asked.of(config),
        workload=workload,
        remat=remat,
        recorded=config,
    )


def _read_model(config: TrainConfig, processes: Processes) -> tuple[TrainConfig, DecoderConfig, Base, Vocabulary]:
    """Return the settled configuration, the architecture in training, the base, and the vocabulary."""
    folder = config.model.folder
    architecture = read_architecture(config, folder)
    adapter = read_initial_adapter(config, architecture)
    architecture = adapter.adapted(architecture) if adapter else _untied_by_head(config, architecture)
    if not config.model.random_weights:
        check_weights(folder, architecture)
    vocabulary = read_vocabulary(folder, config.model.new_tokens, architecture, adapter, config.model.tokenizer)
    config = settle(config, architecture, devices=jax.device_count(), adapter=adapter, vocabulary=vocabulary)
    if processes.is_main:
        warn_of_peft(config, architecture)
        warn_of_adapter_inside(folder, config.model.adapter)
    base = Base.of(config, folder, replace(architecture, vocab_size=vocabulary.base_size), adapter)
    return config, replace(architecture, vocab_size=vocabulary.size), base, vocabulary


def _with_tower(
    config: TrainConfig, model: DecoderConfig, base: Base, data: PreparedData
) -> tuple[TrainConfig, DecoderConfig, Base]:
    """Return the architecture in training and the base with a vision tower where the data have images.

    Raises:
        ValueError: a tower that is to train and no images, one that is not read, or settings that it does not serve.
    """
    trains = config.model.train_vision
    if not any(split is not None and split.reader is not None for split in (data.train, data.eval)):
        if trains != "none":
            raise ValueError(f"--train-vision {trains}: the data have no images: leave it out")
        return config, model, base
    if model.vision is None:
        raw = read_config(base.folder)
        model = with_vision(model, raw, **normalization(base.folder, raw))
    assert model.vision is not None
    if not base.random:
        check_weights(base.folder, model)
    return config, model, replace(base, architecture=model.vision.within(base.architecture))


def _rows(config: TrainConfig) -> Rows:
    run = config.run
    return Rows(
        batch_size=run.batch_size,
        seq_len=config.data.row_tokens,
        micro_batches=run.gradient_accumulation_steps,
        documents=run.documents_per_step,
    )


def _execution(config: TrainConfig, workload: Workload, processes: Processes) -> Execution:
    vision = workload.config.vision
    drops = config.model.method == "lora" and config.lora.dropout
    return Execution(
        router_losses=config.model.router_losses,
        neftune_alpha=config.model.neftune_alpha,
        noise_seed=config.data.seed if drops or config.model.neftune_alpha else None,
        fp8_max_error=config.model.fp8_max_error,
        keeps_features=vision is not None
        and vision.trains == "none"
        and config.model.image_features != "off"
        and processes.count == 1,
    )


def _spike_plan(config: TrainConfig) -> SpikePlan | None:
    how = config.run.on_spike
    return None if how == "nothing" else SpikePlan(sigma=config.run.spike_sigma, rewinds=how == "rewind")


def _teacher_plan(config: TrainConfig) -> TeacherPlan | None:
    folder, storage = config.rollouts.teacher, config.rollouts.teacher_quantize
    if folder is None:
        return None
    storage = config.model.storage if storage is None else storage
    return TeacherPlan(folder=None if folder == "base" else folder, storage=storage)


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
    columns: Columns,
    *,
    shared: bool,
) -> PreparedData:
    """Read and tokenize the data, or the prompts that are answered in training; `shared` by two answers, or copied."""
    if config.objective.kind.needs_rollouts:
        rollouts, held_out = config.rollouts, None
        read = partial(
            read_prompts,
            config.data,
            vocabulary.tokenizer,
            answer=rollouts.max_completion_length,
            limit=config.data.row_tokens,
        )
        prompts = read(teacher_system=rollouts.teacher_system, answered=rollouts.lmbda < 1)
        if config.data.eval_data:
            held_out = read(held_out=True)
        return PreparedData(train=prompts, eval=held_out, report=PromptReport(prompts, held_out))
    task = config.objective.task(shared_prompt=shared, copies=model.recurrent is not None)
    columns = {**config.objective.columns, **columns}
    processor = read_vision(config.model.folder, config.data.image_max_tokens, vocabulary.tokenizer)
    return prepare_data(config.data, vocabulary.tokenizer, model.vocab_size, progress, task, columns, processor)


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


def _check_rollouts(
    config: TrainConfig,
    model: DecoderConfig,
    processes: Processes,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    devices: int,
) -> None:
    """Refuse several processes, a teacher on several devices, and one of another vocabulary."""
    name = config.objective.objective
    if processes.count > 1:
        raise ValueError(f"--objective {name} runs in one process yet: start one")
    if config.objective.kind.needs_teacher and devices > 1:
        raise ValueError(
            f"--objective {name} is for one GPU yet, and there are {devices}: choose one with CUDA_VISIBLE_DEVICES"
        )
    if config.rollouts.teacher not in (None, "base"):
        _check_teacher(config, model, tokenizer)


def _make_rollouts(
    config: TrainConfig, model: DecoderConfig, objective: Objective, data: PreparedData, *, shared: bool
) -> RolloutSteps:
    """Return the steps on answers that the model writes; their rewards are imported here, in processes of their own."""
    dataset, held_out = data.train, data.eval
    assert isinstance(objective, RolloutObjective) and isinstance(dataset, PromptDataset)
    assert held_out is None or isinstance(held_out, PromptDataset)
    judge = Judge(config.rollouts)
    plan = RolloutPlan(
        dataset=dataset,
        objective=objective,
        config=config.rollouts,
        judge=judge,
        seq_len=config.data.row_tokens,
        batch_size=config.run.batch_size,
        seed=config.data.seed,
        shared=shared,
        copies=model.recurrent is not None,
        held_out=held_out,
    )
    steps = RolloutSteps(plan, config.run.output)
    try:
        judge.check({name for prompt in dataset.prompts for name in prompt.columns})
        judge.check_rows([*dataset.prompts, *(held_out.prompts if held_out else ())])
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
    run, seq_len = config.run, config.data.row_tokens
    part, parts = process_batch_shard(mesh_of(mesh), run.batch_size)
    if data.stream:
        batches: BatchIterator | StreamIterator = _stream(config, data, part, parts)
    else:
        batches = BatchIterator(
            data.train,
            seq_len=seq_len,
            seed=config.data.seed,
            epochs=None if run.steps else run.epochs,
            documents_per_step=run.documents_per_step,
            gradient_accumulation_steps=run.gradient_accumulation_steps,
            batch_size=run.batch_size,
            process_index=part,
            process_count=parts,
        )
    if data.eval is None:
        return batches, None
    return batches, EvalBatches(
        data.eval,
        seq_len=seq_len,
        max_segments=batches.max_segments,
        batch_size=run.batch_size,
        process_index=part,
        process_count=parts,
    )


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
