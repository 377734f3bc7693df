"""Set-up of a run: everything that is read, checked and decided before weights are loaded."""

import math
from dataclasses import dataclass, replace

import jax
from transformers import PreTrainedTokenizerBase

from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.prepare import PreparedData, prepare_data
from jaxglue.data.progress import DataProgress
from jaxglue.data.stream import StreamIterator
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.engine.residency import format_weights
from jaxglue.hf.adapter import Adapter
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token
from jaxglue.planner.plan import DoesNotFit
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload, sample_lengths
from jaxglue.sharding.mesh import AUTO, MeshShape, make_mesh, process_batch_shard
from jaxglue.training.checks import check_dropout, check_model, refuse_shared_prompt, warn_of_peft
from jaxglue.training.config import TrainConfig
from jaxglue.training.remat import RematChoice, choose_remat, make_workload
from jaxglue.training.trackers import check_trackers
from jaxglue.training.vocabulary import Vocabulary, read_start, read_vocabulary


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A checked run: data, tokenizer, shapes and steps."""

    config: TrainConfig
    vocabulary: Vocabulary
    data: PreparedData
    workload: Workload
    remat: RematChoice
    batches: BatchIterator | StreamIterator
    eval_batches: EvalBatches | None
    total_steps: int
    adapter: Adapter | None = None
    """To train on from."""

    @property
    def model(self) -> DecoderConfig:
        """Return the model's shape."""
        return self.workload.config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the run's tokenizer."""
        return self.vocabulary.tokenizer

    @property
    def base(self) -> DecoderConfig:
        """Return the base's shape."""
        return replace(self.model, vocab_size=self.vocabulary.base_size)

    @property
    def mesh(self) -> MeshShape:
        """Return the shape of the mesh."""
        return self.workload.mesh

    @property
    def flops_per_token(self) -> float:
        """Return a token's FLOPs of forward and backward over the training documents."""
        full = self.config.model.method == "full"
        keys = mean_visible_keys(self.data.train.document_lengths)
        return training_flops_per_token(self.model, visible_keys=keys, weight_gradients=full)


def prepare(config: TrainConfig, processes: Processes = SINGLE_PROCESS) -> Setup:
    """Read and check model folder, tokenizer and data; load no weights.

    Args:
        config: of the run.
        processes: of the run; process 0 tokenizes, the others read its cache.

    Raises:
        ValueError: bad model folder, data or settings; names the file and the remedy.
    """
    check_trackers(config.run.trackers)
    config = with_global_batch(config)
    model = read_model(config)
    config = with_seq_len(config, model)
    config, adapter = read_start(config, model)
    if processes.is_main:
        warn_of_peft(config, model)
    if not config.model.random_weights:
        open_checkpoint(config.model.folder)
    config, vocabulary = read_vocabulary(config, model, adapter)
    model, tokenizer = replace(model, vocab_size=vocabulary.size), vocabulary.tokenizer
    with processes.main_process_first():
        progress = DataProgress() if processes.is_main else None
        task = config.objective.task(shared_prompt=not refuse_shared_prompt(config, model))
        data = prepare_data(config.data, tokenizer, model.vocab_size, progress, task)
    lengths = sample_lengths(data.train.document_lengths)
    mesh, remat = agree_on_mesh(config, model, lengths, processes, _expected_steps(config, data))
    batches, eval_batches = _make_batches(config, data, mesh)
    total_steps = config.run.steps or batches.total_steps
    assert total_steps is not None
    workload = replace(make_workload(config, model, lengths, mesh), host_embeddings=remat.host_embeddings)
    if config.objective.kind.needs_reference:
        frozen, epochs = config.model.method == "lora" and adapter is None, total_steps / batches.steps_per_epoch
        beside = runs_beside(config, workload, remat, epochs=epochs, frozen=frozen, processes=processes)
        workload = replace(workload, reference=beside)
    return Setup(
        config=config,
        vocabulary=vocabulary,
        data=data,
        workload=workload,
        remat=remat,
        batches=batches,
        eval_batches=eval_batches,
        total_steps=total_steps,
        adapter=adapter,
    )


def _expected_steps(config: TrainConfig, data: PreparedData) -> int:
    """Return the run's optimizer steps, about: as if every row were full."""
    run, tokens = config.run, int(data.train.document_lengths.sum())
    row = config.data.row_tokens * run.batch_size * run.gradient_accumulation_steps
    return run.steps or max(1, -(-run.epochs * tokens // row))


def read_model(config: TrainConfig) -> DecoderConfig:
    """Return the model's shape, as its experts and linear layers are stored in this run."""
    raw = read_config(config.model.folder)
    model = config_from_hf(raw)
    check_dropout(config.model.model, raw)
    if model.scores and not config.objective.kind.trains_scores:
        raise ValueError(
            f"{config.model.model} is a reward model, which --objective {config.objective.objective} cannot train: use "
            "--objective reward, or a causal language model"
        )
    if config.objective.kind.trains_scores:
        model = model.scored
    if config.model.expand_experts:
        model = model.expanded
    model = model.quantized(config.model.storage, **config.model.fp8_products)
    check_model(config, model)
    return model


def with_seq_len[C: TrainConfig](config: C, model: DecoderConfig) -> C:
    """Return the configuration with a length of rows; a given one stays."""
    return replace(config, data=config.data.within(model.max_position_embeddings))


def _make_batches(
    config: TrainConfig, data: PreparedData, mesh: MeshShape
) -> tuple[BatchIterator | StreamIterator, EvalBatches | None]:
    """Return this process's part of the training batches and of the held-out ones, if there are any."""
    run = config.run
    part, parts = process_batch_shard(make_mesh(mesh) if mesh.devices > 1 else None, run.batch_size)
    sizes: dict[str, int] = {"batch_size": run.batch_size, "process_index": part, "process_count": parts}
    batches = _training_batches(config, data, sizes)
    if data.eval is None:
        return batches, None
    return batches, EvalBatches(data.eval, seq_len=config.data.row_tokens, max_segments=batches.max_segments, **sizes)


def _training_batches(config: TrainConfig, data: PreparedData, sizes: dict[str, int]) -> BatchIterator | StreamIterator:
    run, sizes = config.run, {**sizes, "gradient_accumulation_steps": config.run.gradient_accumulation_steps}
    if data.stream:
        assert data.window is not None and run.steps is not None
        return StreamIterator(data.stream, data.window, steps=run.steps, **sizes)
    epochs = None if run.steps else run.epochs
    return BatchIterator(data.train, seq_len=config.data.row_tokens, seed=config.data.seed, epochs=epochs, **sizes)


def choose_mesh(
    config: TrainConfig, model: DecoderConfig, document_lengths: tuple[int, ...], steps: int | None = None
) -> tuple[MeshShape, RematChoice]:
    """Return the run's mesh, or the first of `auto`'s candidates that fits, with the remat policy on it.

    Args:
        config: of the run.
        model: the model's shape.
        document_lengths: of `Workload`.
        steps: of the run, about; None for many.

    Raises:
        ValueError: the mesh does not fit the devices, the batch or the model.
        DoesNotFit: nothing fits the GPUs' memory.
    """
    devices = jax.device_count()
    if devices > 1 and config.model.embeddings == "host":
        raise ValueError("--embeddings host is for one GPU: leave it out, or split the table with --mesh fsdp=…")
    shapes = _candidates(config, model, devices) if config.run.mesh == AUTO else [MeshShape.parse(config.run.mesh)]
    for shape in shapes:
        shape.check(model, batch_size=config.run.batch_size, devices=devices)
    *others, last = shapes
    for shape in others:
        try:
            return shape, choose_remat(config, model, document_lengths, shape, steps)
        except DoesNotFit:
            continue
    return last, choose_remat(config, model, document_lengths, last, steps)


def with_global_batch(config: TrainConfig) -> TrainConfig:
    """Return the configuration with `batch_size` for all devices, if it is given for each."""
    run = config.run
    if run.per_device_batch_size is None:
        return config
    shards = jax.device_count() if run.mesh == AUTO else MeshShape.parse(run.mesh).batch_shards
    batch_size = run.per_device_batch_size * shards
    return replace(config, run=replace(run, batch_size=batch_size, per_device_batch_size=None))


def agree_on_mesh(
    config: TrainConfig,
    model: DecoderConfig,
    document_lengths: tuple[int, ...],
    processes: Processes,
    steps: int | None = None,
) -> tuple[MeshShape, RematChoice]:
    """Return process 0's choice on every process: programs must be the same, and GPUs' free memory may differ."""
    if processes.is_main:
        mesh, remat = choose_mesh(config, model, document_lengths, steps)
        processes.all_gather_object(
            [str(mesh), remat.remat, format_weights(remat.weights), remat.attention, remat.tile]
        )
        return mesh, remat
    chosen, remat_text, weights, attention, tile = processes.all_gather_object(None)[0]
    agreed = replace(
        config,
        model=replace(config.model, remat=remat_text, weights=weights, attention=attention, tile=tile),
        run=replace(config.run, mesh=chosen),
    )
    return choose_mesh(agreed, model, document_lengths)


def _candidates(config: TrainConfig, model: DecoderConfig, devices: int) -> list[MeshShape]:
    """Return candidates: for adapters, copies of the weights, then parts; for full fine-tuning, parts.

    Experts are spread over as few devices as they fit, since tokens then travel the least.
    """
    experts = math.gcd(devices, model.moe.num_experts if model.moe else 1)
    if config.model.method == "full":
        return [MeshShape(expert=experts, fsdp=devices // experts)]
    sizes = [size for size in range(2, experts + 1) if experts % size == 0]
    spread = [MeshShape(expert=size, data=devices // size) for size in sizes]
    return [MeshShape(data=devices), *(spread or [MeshShape(fsdp=devices)])]


def runs_beside(
    config: TrainConfig, workload: Workload, remat: RematChoice, *, epochs: float, frozen: bool, processes: Processes
) -> bool:
    """Return whether the reference's layers run beside the model's in every step; `auto` takes the faster.

    Args:
        config: of the run.
        workload: as `remat` runs it.
        remat: places of the weights, and the policies.
        epochs: how often the steps read each document.
        frozen: the reference is the frozen weights alone.
        processes: of the run, which take process 0's choice.

    Raises:
        ValueError: `--reference-cache off` where the reference must be computed before training.
    """
    how = config.objective.reference_cache
    if how == "off" and not frozen:
        raise ValueError(
            "--reference-cache off runs the frozen weights without adapter as the reference, and this run begins with "
            f"other weights (--method {config.model.method}, --adapter {config.model.adapter}): use auto or on"
        )
    if how != "auto" or not frozen:
        return how == "off"
    faster = processes.is_main and _is_faster_beside(workload, remat, epochs)
    return processes.all_gather_object(faster)[0]


def _is_faster_beside(workload: Workload, remat: RematChoice, epochs: float) -> bool:
    """Compare predicted times; with no weights to stream, both passes over a row take the same."""
    if epochs <= 1 or not remat.streams_weights or jax.default_backend() == "cpu":
        return epochs <= 1
    gpu = replace(device_gpu(jax.local_devices()[0]), files=remat.files)
    workload = replace(workload, tile=remat.tile, attention=remat.attention, reference=True)
    planner = Planner(workload, gpu, layers_per_program=remat.layers_per_program)
    beside, alone = planner.predictor.reference_seconds(remat.policies, remat.weights)
    return epochs * beside <= alone
