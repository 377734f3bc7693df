"""Set-up of a run: everything that is read, checked and decided before weights are loaded."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.prepare import PreparedData, prepare_data
from jaxglue.data.progress import DataProgress
from jaxglue.data.stream import StreamIterator
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.hf.adapter import Adapter
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.planner.documents import sample_lengths
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token
from jaxglue.planner.workload import Workload
from jaxglue.sharding.mesh import MeshShape, make_mesh, process_batch_shard
from jaxglue.training.checks import check_dropout, check_model, warn_of_peft
from jaxglue.training.config import TrainConfig
from jaxglue.training.devices import agree_on_mesh, with_global_batch
from jaxglue.training.new_tokens import Vocabulary, read_vocabulary
from jaxglue.training.reference_place import runs_beside
from jaxglue.training.remat import RematChoice
from jaxglue.training.row_length import with_seq_len
from jaxglue.training.shared_prompt import refuse_shared_prompt
from jaxglue.training.start_adapter import read_start
from jaxglue.training.trackers import check_trackers
from jaxglue.training.workload import make_workload


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
        data = prepare_data(config.data, tokenizer, model.vocab_size, progress, task, config.objective.kind.columns)
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
