"""Architecture, adapter to train on from, batch, rows and workload, decided before any data is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxglue.data.config import DEFAULT_SEQ_LEN
from jaxglue.hf.adapter import find_base
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.draft import draft_shapes
from jaxglue.hf.hub import model_path
from jaxglue.models import abstract_model, config_from_hf, with_vision
from jaxglue.models.config import DecoderConfig
from jaxglue.models.draft import DRAFTS
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.wrapper import text_config
from jaxglue.planner.vision import feature_bytes, tower_block
from jaxglue.planner.workload import TowerWork, Workload, abstract_parts, tree_bytes
from jaxglue.sharding.mesh import AUTO, MeshShape
from jaxglue.training.checks import check_dropout, check_model
from jaxglue.training.config import TrainConfig
from jaxglue.training.optimizer import state_bytes

if TYPE_CHECKING:
    from jaxglue.hf.adapter import Adapter
    from jaxglue.training.vocabulary import Vocabulary

from jaxglue.hf.adapter import Adapter, load_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.identity import Identity, identify, identify_random
from jaxglue.models.lora import base_shapes
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.vision.processor import read_processor


def read_architecture(config: TrainConfig, folder: Path) -> DecoderConfig:
    """Return the architecture of a model folder, as its experts and linear layers are stored in this run.

    Raises:
        ValueError: a bad folder, or a model that the objective or the settings cannot train.
    """
    raw = read_config(folder)
    model = config_from_hf(raw)
    check_dropout(config.model.model, text_config(raw))
    if not getattr(config.objective, "bidirectional", False):
        model.require_causal(config.model.model)
    elif model.recurrent:
        raise ValueError(
            f"--bidirectional: layers of {model.recurrent} in {config.model.model} follow tokens in one direction: "
            "leave it out"
        )
    wide = [dims for dims in getattr(config.objective, "matryoshka_dims", ()) if dims > model.hidden_size]
    if wide:
        raise ValueError(f"--matryoshka-dims {wide[0]}: embeddings have {model.hidden_size} dimensions: give fewer")
    if model.scores and not config.objective.kind.trains_scores:
        raise ValueError(
            f"{config.model.model} is a reward model or classifier, which --objective {config.objective.objective} "
            "cannot train: use --objective reward or classify, or a causal language model"
        )
    if config.objective.kind.trains_scores:
        labels = config.objective.make().labels
        if model.scores and model.labels != labels:
            raise ValueError(
                f"{config.model.model} has {model.labels} labels, this run {labels}: use its base, or --num-labels"
            )
        model = model.scored(labels)
    if config.model.expand_experts:
        model = model.expanded
    if config.model.train_vision != "none":
        model = with_vision(model, raw, trains=config.model.train_vision, **normalization(folder, raw))
    model = model.quantized(config.model.storage, **config.model.fp8_products)
    check_model(config, model)
    return model


def normalization(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return mean and deviation of colors by which a folder's tower was trained."""
    processor = read_processor(folder, raw)
    return {} if processor is None else {"mean": processor.mean, "std": processor.std}


def training_devices(config: TrainConfig) -> int:
    """Return the devices that train: of two, one where the other samples ahead."""
    count = jax.device_count()
    return 1 if config.rollouts.staleness and count == 2 else count


def settle[C: TrainConfig](
    config: C,
    model: DecoderConfig,
    *,
    devices: int,
    adapter: "Adapter | None" = None,
    vocabulary: "Vocabulary | None" = None,
) -> C:
    """Return the configuration with what model, devices, adapter and vocabulary decide; nothing later changes it.

    The batch size is that over all devices, and rows have a length: a given one, or the default within the model's.
    """
    run, lora = config.run, config.lora
    if run.per_device_batch_size is not None:
        shards = devices if run.mesh == AUTO else MeshShape.parse(run.mesh).batch_shards
        run = replace(run, batch_size=run.per_device_batch_size * shards, per_device_batch_size=None)
    if vocabulary is not None:
        lora = _trained_parts(lora, adapter, vocabulary, full=config.model.method == "full")
    lora = replace(lora, dropout=lora.dropout or 0.0)
    return replace(config, run=run, lora=lora, data=config.data.within(model.max_position_embeddings))


def _trained_parts(lora: LoraConfig, adapter: "Adapter | None", vocabulary: "Vocabulary", *, full: bool) -> LoraConfig:
    """Return the settings of a run's adapters: those of the one it trains on from, and with the rows of new tokens."""
    if adapter is not None:
        lora = replace(adapter.config, dropout=adapter.config.dropout if lora.dropout is None else lora.dropout)
    if full or not vocabulary.new_rows:
        return lora
    rows = {*lora.trainable_token_indices, *vocabulary.new_rows}
    return replace(lora, trainable_token_indices=tuple(sorted(rows)))


def row_text(seq_len: int, model: DecoderConfig | None) -> str:
    """Describe the length of rows, and why one at a model's limit, if that is known, is below the default."""
    tokens = f"{seq_len:,} tokens"
    if model and seq_len == model.max_position_embeddings < DEFAULT_SEQ_LEN:
        return f"{tokens} (all positions of the model, fewer than the default of {DEFAULT_SEQ_LEN:,} tokens)"
    return tokens


def read_teacher(config: TrainConfig) -> DecoderConfig:
    """Return the architecture of the folder of `--teacher`, as its linear layers are stored."""
    assert config.rollouts.teacher is not None
    folder = model_path(config.rollouts.teacher, weights=False)
    wanted = config.rollouts.teacher_quantize
    return config_from_hf(read_config(folder)).quantized(config.model.storage if wanted is None else wanted)


def other_models(config: TrainConfig) -> list[DecoderConfig]:
    """Return the architectures of the models that are loaded beside the one in training: a teacher, and rewards."""
    found = [read_teacher(config)] if config.rollouts.teacher not in (None, "base") else []
    if not config.rollouts.reward:
        return found
    from jaxglue.rl.rewards import parse_reward  # which imports transformers, for an estimate in vain

    for folder in filter(None, (parse_reward(text).folder for text in config.rollouts.reward)):
        is_adapter = (folder / "adapter_config.json").is_file()
        found.append(config_from_hf(read_config(find_base(folder, weights=False) if is_adapter else folder)))
    return found


def may_run_in_steps(config: TrainConfig) -> bool:
    """Tell whether the reference's layers run beside the model's in every step, as far as flags decide."""
    several = config.run.epochs > 1 and config.run.steps is None
    cached = config.objective.reference_cache == "on" or (config.objective.reference_cache == "auto" and several)
    return config.model.method == "lora" and config.model.adapter is None and not cached


@dataclass(frozen=True, kw_only=True)
class KnownRows:
    """What is known of a run's rows before its plan; `Workload` explains all fields but `has_data`."""

    has_data: bool = True
    """The run reads them, rather than a session's caller."""
    tower: TowerWork | None = None
    targets: float = 1.0
    host_tower: bool = False


WITH_DATA = KnownRows()


def make_workload(
    config: TrainConfig,
    model: DecoderConfig,
    document_lengths: tuple[int, ...],
    mesh: MeshShape,
    rows: KnownRows = WITH_DATA,
) -> Workload:
    """Return a run's workload on one GPU of a mesh.

    Args:
        config: of the run.
        model: the model's architecture.
        document_lengths: of `Workload`.
        mesh: how GPUs share the work.
        rows: what is known of them; a mesh of several GPUs has the tower on each.
    """
    host_tower = rows.host_tower and mesh.devices == 1
    runs_beside = not host_tower and rows.tower is None and config.model.train_vision == "none"
    optimizer, dtype, kind = config.optimizer, config.model.compute_dtype, config.objective.kind
    others = [nnx.state(abstract_model(other, dtype=dtype)) for other in other_models(config)]
    tokens = config.run.batch_size // mesh.batch_shards * config.data.row_tokens
    workload = Workload(
        config=model,
        batch_size=config.run.batch_size // mesh.batch_shards,
        seq_len=config.data.row_tokens,
        lora=config.lora if config.model.method == "lora" else None,
        document_lengths=document_lengths,
        gradient_accumulation_steps=config.run.gradient_accumulation_steps,
        update_in_backward=optimizer.update_in_backward,
        host_embeddings=config.model.embeddings == "host",
        mesh=mesh,
        dtype=dtype,
        attention=config.model.attention,
        tile=config.model.tile,
        exact=kind.needs_rollouts and config.rollouts.exact_sampling == "on",
        objective=config.objective.make(),
        reference=kind.needs_reference and may_run_in_steps(config),
        other_models=sum(map(tree_bytes, others))
        + draft_bytes(config, model, mesh)
        + feature_bytes(model, tokens, dtype)
        + (tower_block(model, dtype) if runs_beside else 0),
        host_tower=host_tower,
        tower=rows.tower,
        targets=rows.targets,
        batches_known=rows.has_data and not (config.data.streaming or kind.needs_rollouts or kind.needs_reference),
    )
    return replace(workload, moment_bytes=state_bytes(optimizer, abstract_parts(workload)[1]))


def draft_bytes(config: TrainConfig, model: DecoderConfig, mesh: MeshShape) -> int:
    """Return the bytes of a draft head that a run trains, about: weights, optimizer, and a layer's values once."""
    if config.model.train_draft == "off" or model.model_type not in DRAFTS:
        return 0
    size, dtype = sum(map(math.prod, draft_shapes(model).values())), config.model.compute_dtype
    full = (config.model.draft_method or config.model.method) == "full"
    trained = 16 * size if full else size * dtype.itemsize
    tokens = config.run.batch_size // mesh.batch_shards * config.data.row_tokens
    width = model.moe.num_experts_per_tok * model.moe.intermediate_size if model.moe else model.intermediate_size
    heads = 4 * model.num_attention_heads * model.head_dim
    return int(trained + tokens * dtype.itemsize * (16 * model.hidden_size + 6 * width + heads))


def read_initial_adapter(config: TrainConfig, model: DecoderConfig) -> Adapter | None:
    """Return the adapter that a run trains on from; None without `--adapter`.

    Raises:
        ValueError: not an adapter folder, one that does not fit the base, or flags that contradict it.
    """
    folder = config.model.adapter
    if folder is None:
        return None
    adapter, tied = load_adapter(folder), model
    model = adapter.adapted(tied)
    if model != tied and config.model.random_weights:
        raise ValueError(
            f"--adapter {folder} has embedding and output projection apart, which --random-weights draws as one: "
            "leave one of them out"
        )
    drawn = config.data.seed if config.model.random_weights else None
    identity = base_identity(model, config.model.folder, drawn)
    adapter = check_adapter(adapter, base_shapes(abstract_model(model)), identity, config.model.model)
    if adapter.labels != (model.labels if model.scores else 0):
        what = f"of a model with {adapter.labels} scores" if adapter.scores else "of a text model"
        objective = config.objective.objective
        raise ValueError(f"--adapter {folder} is {what}, so --objective {objective} cannot train it on")
    lora, given = adapter.config, replace(config.lora, dropout=None)
    if given not in (LoraConfig(), replace(lora, dropout=None)):
        raise ValueError(
            f"--adapter {folder} brings its own rank {lora.rank}, alpha {lora.alpha:g} and targets "
            f"{', '.join(lora.targets[:8])}: leave out the other settings of adapters than --dropout"
        )
    return adapter


def base_identity(model: DecoderConfig, folder: Path, drawn: int | None) -> Identity:
    """Return the identity of a base, with the format of its linear layers, which an adapter records.

    Args:
        model: the base's architecture.
        folder: of the base.
        drawn: seed of random weights; None for those in the folder.
    """
    identity = identify(folder) if drawn is None else identify_random(model, drawn)
    made = FORMATS[model.quantize]
    if not (made.offered or made.recorded):
        return identity
    skipped = {"unquantized": ",".join(model.unquantized)} if model.unquantized else {}
    return {**identity, "quantize": model.quantize, **skipped}
