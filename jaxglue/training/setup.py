"""Set-up of a run: everything that is read, checked and decided before weights are loaded."""

import logging
import math
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from jaxglue.data.config import NO_COLUMNS, Columns, DataConfig
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.formats import PLAIN
from jaxglue.data.iterator import BatchIterator
from jaxglue.data.prepare import PreparedData
from jaxglue.data.progress import DataProgress
from jaxglue.data.reads import ReadDataset, ReadTask
from jaxglue.data.report import DataReport
from jaxglue.data.tokenize import first_row
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.generation.prompts import encode_prompt
from jaxglue.hf.adapter import warn_of_adapter_inside
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import check_weights
from jaxglue.models import with_vision
from jaxglue.models.config import DecoderConfig
from jaxglue.models.tower_config import Trains
from jaxglue.objectives.objective import Objective
from jaxglue.objectives.reading import ReadObjective
from jaxglue.planner.workload import TowerWork, Workload, sample_lengths
from jaxglue.settings.config import is_jinja
from jaxglue.training.checks import warn_of_peft
from jaxglue.training.config import RunConfig, TrainConfig
from jaxglue.training.draft import plan_draft
from jaxglue.training.remat import Asked, agree_on_mesh, runs_in_steps
from jaxglue.training.row_source import Batches, row_source
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
    TextPlan,
)
from jaxglue.training.sampling import choose_exact
from jaxglue.training.trackers import check_trackers
from jaxglue.training.vocabulary import Vocabulary, read_vocabulary, run_stops
from jaxglue.training.workload import (
    KnownRows,
    normalization,
    read_architecture,
    read_initial_adapter,
    settle,
    training_devices,
)
from jaxglue.vision.images import ImageSource, image_source
from jaxglue.vision.records import record_image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STEPS = 4096
"""Steps of which it is checked that they train something."""
_FULLEST = 1.1
"""Targets of the row with most of them over those of others, about."""
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
    recorded = config
    exact: str = config.rollouts.exact_sampling
    if config.objective.kind.needs_rollouts and exact == "auto":
        config, exact = choose_exact(config, model)
    source = row_source(config, model)
    with processes.main_process_first():
        data = source.read(vocabulary.tokenizer, DataProgress() if processes.is_main else None, columns)
    model, base = _with_tower_for(config, model, base, data, processes)
    lengths = sample_lengths(data.train.document_lengths)
    planned = replace(config, run=_with_micro_batches(config, data))
    rows = KnownRows(
        tower=_tower_work(config, data, processes),
        targets=_target_share(data),
        host_tower=_leaves_device(config, model, processes),
    )
    workload, remat = agree_on_mesh(planned, model, lengths, processes, _expected_steps(planned, data), rows)
    source.check(workload.mesh, processes, vocabulary.tokenizer)
    batches, eval_batches, total_steps = source.batches(data, workload)
    _check_losses(workload.objective, batches, processes)
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
    stops = run_stops(vocabulary.tokenizer, base.folder, config.model.adapter, config.data.stop_tokens)
    evaluate = run.eval_every or batches.steps_per_epoch
    return Run(
        base=base,
        vocabulary=vocabulary,
        stops=stops,
        rows=_rows(config),
        schedule=schedule,
        execution=_execution(config, workload, processes),
        asked=Asked.of(config),
        workload=workload,
        remat=remat,
        teacher=_teacher_plan(config),
        spikes=_spike_plan(config),
        draft=plan_draft(config, workload),
        recorded=recorded,
        data=data,
        texts=_text_plan(config.data, vocabulary.tokenizer, stops, data.report, source.loss_on(data)),
        read_first_row=partial(
            first_row,
            config.data,
            preferences=preferences,
            task=_read_task(workload.objective),
            images=data.images,
        ),
        why_copied=source.why_copied,
        exact=exact if config.objective.kind.needs_rollouts else None,
        cache=Path(config.data.cache_dir),
        batches=batches,
        eval_batches=eval_batches,
        cadence=Cadence(log=run.log_every, evaluate=evaluate, save=run.save_every or evaluate),
        samples=_samples(run, vocabulary.tokenizer, model, data),
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


def resolve_model(config: TrainConfig, *, images: bool = False) -> Setup:
    """Read and check model folder and tokenizer, and choose a plan for full rows; load no weights.

    Args:
        config: of which the data are not read.
        images: load the model's tower, to see images.

    Raises:
        ValueError: bad model folder or settings; names the file and the remedy.
    """
    if config.model.train_draft != "off":
        raise ValueError("train_draft is for runs, whose steps it follows: leave it out of a session")
    config, model, base, vocabulary = _read_model(config, SINGLE_PROCESS)
    assert config.run.steps is not None
    if images:
        model, base = _with_tower(model, base, hears=True)
    workload, remat = agree_on_mesh(config, model, (), SINGLE_PROCESS, config.run.steps, KnownRows(has_data=False))
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


def _check_losses(objective: Objective, batches: Batches, processes: Processes) -> None:
    """Refuse a run in whose first steps none can train anything, and warn of one in which several cannot."""
    if not isinstance(objective, ReadObjective) or not isinstance(batches, BatchIterator):
        return
    dataset = batches.dataset
    assert isinstance(dataset, ReadDataset)
    whys = [objective.why_constant(dataset, units) for units in islice(batches.documents(), _STEPS)]
    constant = [*filter(None, whys)]
    if len(constant) == len(whys):
        steps = "its step" if len(whys) == 1 else f"any of the first {len(whys):,} steps"
        raise ValueError(
            f"{constant[0]} in {steps}, whose loss is then constant and trains nothing: add rows or hard negatives, or "
            "raise --documents-per-step"
        )
    if len(constant) > 1 and processes.is_main:  # one is a rest
        _log.warning(
            "%s in %d of the first %d steps, which train nothing: raise --documents-per-step",
            *(constant[0], len(constant), len(whys)),
        )


def _read_task(objective: Objective) -> ReadTask | None:
    """Return the treatment of rows whose parts are read; None for others."""
    task = objective.task(shared_prompt=True)
    return task if isinstance(task, ReadTask) else None


def _read_model(config: TrainConfig, processes: Processes) -> tuple[TrainConfig, DecoderConfig, Base, Vocabulary]:
    """Return the settled configuration, the architecture in training, the base, and the vocabulary."""
    folder = config.model.folder
    architecture = read_architecture(config, folder)
    adapter = read_initial_adapter(config, architecture)
    architecture = adapter.adapted(architecture) if adapter else _untied_by_head(config, architecture)
    if not config.model.random_weights:
        check_weights(folder, architecture)
    vocabulary = read_vocabulary(folder, config.model.new_tokens, architecture, adapter, config.model.tokenizer)
    config = settle(config, architecture, devices=training_devices(config), adapter=adapter, vocabulary=vocabulary)
    if processes.is_main:
        warn_of_peft(config, architecture)
        warn_of_adapter_inside(folder, config.model.adapter)
    base = Base.of(config, folder, replace(architecture, vocab_size=vocabulary.base_size), adapter)
    return config, replace(architecture, vocab_size=vocabulary.size), base, vocabulary


def _with_tower_for(
    config: TrainConfig, model: DecoderConfig, base: Base, data: PreparedData, processes: Processes
) -> tuple[DecoderConfig, Base]:
    """Return the architecture in training and the base with a vision tower where the data have images.

    Raises:
        ValueError: a tower that is to train and no images, one that is not read, or settings that it does not serve.
    """
    trains = config.model.train_vision
    if not data.readers:
        if trains != "none":
            raise ValueError(f"--train-vision {trains}: the data have no images: leave it out")
        return model, base
    if config.model.train_draft != "off":
        raise ValueError(f"--train-draft {config.model.train_draft}: draft heads train on texts alone: leave it out")
    hears = any(reader.hears for reader in data.readers)
    if processes.count > 1 and hears:
        raise ValueError("clips of audio are read by one process: start one, or leave out rows with clips")
    return _with_tower(model, base, hears=hears or data.stream is not None)


def _samples(
    run: RunConfig, tokenizer: "PreTrainedTokenizerBase", model: DecoderConfig, data: PreparedData
) -> SamplePrompts:
    """Return the prompts and images to answer while a run trains.

    Raises:
        ValueError: the tokenizer has no chat template, or its template refuses a prompt; an image that cannot be read,
            or a model that sees none.
    """
    if run.sample_image and (data.images is None or model.vision is None):
        raise ValueError("--sample-image: the model sees no images in this run, of which the data have none")
    images = list[ImageSource]()
    for value in run.sample_image:
        assert data.images is not None
        try:
            images.append(image_source(value, Path()))
            record_image(images[-1], data.images.processor, len(images))
        except ValueError as error:
            raise ValueError(f"--sample-image: {error}") from error
    prompts = {prompt: encode_prompt(tokenizer, prompt) for prompt in run.sample_prompt}
    return SamplePrompts(prompts=prompts, tokens=run.sample_tokens, images=images)


def _tower_work(config: TrainConfig, data: PreparedData, processes: Processes) -> TowerWork | None:
    """Return the images of documents whose tower runs in each step; None where it runs once, or for answers to come."""
    images = data.train.reader.store.images if data.train.reader is not None else None
    keeps = _keeps_features(config.model.train_vision, processes) and config.model.image_features != "off"
    if images is None or keeps or config.objective.kind.needs_rollouts:
        return None
    store = data.train.store
    return TowerWork(images=len(images) / float(store.lengths.sum()), patches=float(images.patches.mean()))


def _leaves_device(config: TrainConfig, model: DecoderConfig, processes: Processes) -> bool:
    """Return whether a tower is on the GPU only while it runs, between steps: answers and references run it beside."""
    keeps = _keeps_features(config.model.train_vision, processes) and config.model.image_features != "off"
    kind = config.objective.kind
    beside = kind.needs_rollouts or kind.needs_reference or config.run.sample_image
    return model.vision is not None and keeps and not beside


def _target_share(data: PreparedData) -> float:
    """Return the share of targets in the row with most of them, about; 1 where rows have no bound of them."""
    train = data.train
    if data.stream is not None or not isinstance(train, TokenDataset):
        return 1.0
    return min(1.0, _FULLEST * float(train.targets.sum()) / float(train.lengths.sum()))


def _keeps_features(trains: Trains, processes: Processes) -> bool:
    """Return whether features of a tower that trains so may be kept."""
    return trains == "none" and processes.count == 1


def _with_tower(model: DecoderConfig, base: Base, *, hears: bool) -> tuple[DecoderConfig, Base]:
    """Return an architecture and its base with a vision tower, and that of clips of audio where the model `hears`.

    Raises:
        ValueError: a tower that is not read.
    """
    if model.vision is None or hears:
        raw, trains = read_config(base.folder), "none" if model.vision is None else model.vision.trains
        settings = {"hears": hears, "trains": trains, **normalization(base.folder, raw)}
        model = with_vision(replace(model, vision=None), raw, **settings)
    assert model.vision is not None
    architecture = model.vision.within(base.architecture)
    if not base.random:
        check_weights(base.folder, architecture)
    return model, replace(base, architecture=architecture)


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
    keeps = vision is not None and _keeps_features(vision.trains, processes)
    return Execution(
        router_losses=config.model.router_losses,
        neftune_alpha=config.model.neftune_alpha,
        noise_seed=config.data.seed if drops or config.model.neftune_alpha else None,
        fp8_max_error=config.model.fp8_max_error,
        image_features=config.model.image_features if keeps else "off",
    )


def _text_plan(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", stops: frozenset[int], report: object, loss_on: str
) -> TextPlan:
    """Describe how rows become tokens and loss."""
    template = config.chat_template or ("the tokenizer's own" if tokenizer.chat_template else "none")
    if config.chat_template is not None and is_jinja(config.chat_template):
        template = "the text of --chat-template"
    if isinstance(report, DataReport) and {*report.format.split(", ")} <= PLAIN:
        template = "not used, as rows are plain text"
    ends = " or ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(stops))))
    return TextPlan(template=f"{template}; answers end with {ends}", loss_on=loss_on)


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


def _expected_steps(config: TrainConfig, data: PreparedData) -> int:
    """Return the run's optimizer steps, about: as if every row were full."""
    run, tokens = config.run, int(data.train.document_lengths.sum())
    row = config.data.row_tokens * run.batch_size * run.gradient_accumulation_steps
    return run.steps or max(1, math.ceil(run.epochs * tokens / row))


def _with_micro_batches(config: TrainConfig, data: PreparedData) -> RunConfig:
    """Return the run's settings with the micro-batches of a step of documents, about, and at least two: most have."""
    run, count = config.run, config.run.documents_per_step
    if count is None:
        return run
    rows = count * float(data.train.document_lengths.mean()) / config.data.row_tokens
    count = max(2, math.ceil(rows / run.batch_size))
    return replace(run, gradient_accumulation_steps=count, documents_per_step=None)
