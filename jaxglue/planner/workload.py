"""A training workload as shapes, from which plans are made."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxglue.data.packing import plan_packing
from jaxglue.models import build_model
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import ModelGraphDefs, Params, split_model
from jaxglue.models.tower_config import TrainedParams
from jaxglue.objectives.config import SUPERVISED
from jaxglue.objectives.objective import Objective
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.ops.segments import BatchKind, batch_kind, segment_bucket
from jaxglue.planner.flops import mean_visible_keys
from jaxglue.sharding.mesh import MeshShape

_SAMPLE = 1024


class MicroBatches(NamedTuple):
    """Micro-batches whose attention runs in the same kernels."""

    share: float
    """Share of all micro-batches."""
    kind: BatchKind
    documents: tuple[tuple[int, ...], ...]
    """Lengths of the documents of such micro-batches, in order."""

    @property
    def batches(self) -> int:
        """Return the number of these micro-batches."""
        return len(self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of all their documents."""
        return tuple(itertools.chain(*self.documents))


def sample_lengths(lengths: Int[np.ndarray, " documents"]) -> tuple[int, ...]:
    """Return at most 1,024 lengths in place of all, each the root mean square of similar ones."""
    if len(lengths) <= _SAMPLE:
        return tuple(lengths.tolist())
    parts = np.array_split(np.sort(lengths).astype(float), _SAMPLE)
    return tuple(round(np.sqrt((part**2).mean())) for part in parts)


@lru_cache(maxsize=64)
def sample_micro_batches(lengths: tuple[int, ...], *, seq_len: int, batch_size: int) -> tuple[MicroBatches, ...]:
    """Pack documents of these lengths, cut to a row, into rows; without any, one document fills each row.

    Args:
        lengths: of a sample of documents.
        seq_len: tokens in a row.
        batch_size: rows in a micro-batch.
    """
    documents = np.minimum(lengths or (seq_len,), seq_len)
    documents = np.tile(documents, -(-batch_size * seq_len // int(documents.sum())))  # enough for a micro-batch
    plan = plan_packing(documents, seq_len=seq_len, rng=np.random.default_rng(0))
    rows = [documents[plan.row(row)].tolist() for row in range(plan.rows)]
    batches = [rows[first : first + batch_size] for first in range(0, max(len(rows) - batch_size, 0) + 1, batch_size)]
    slots = segment_bucket(plan.max_segments)
    kinds: dict[BatchKind, list] = {}
    for batch in batches:
        kinds.setdefault(batch_kind(batch, slots), []).append(batch)
    return tuple(
        MicroBatches(
            share=len(members) / len(batches),
            kind=kind,
            documents=tuple(tuple(itertools.chain(*batch)) for batch in members),
        )
        for kind, members in sorted(kinds.items())
    )


class TowerWork(NamedTuple):
    """Images among a run's tokens, on average."""

    images: float
    """Images for each token."""
    patches: float
    """Of an image."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, batch and mesh of a run: everything that decides time and memory of a step, but the policy."""

    config: DecoderConfig
    batch_size: int
    """Rows of a micro-batch on one GPU."""
    seq_len: int
    """Tokens of a row, of which a GPU along `context` has its part."""
    lora: LoraConfig | None
    """None trains all weights."""
    document_lengths: tuple[int, ...] = ()
    """Lengths of the documents, or of a sample of them; without any, one document fills each row."""
    gradient_accumulation_steps: int = 1
    update_in_backward: bool = False
    """Update each layer as soon as its gradients are computed (`Executor.loss_and_update`)."""
    moment_bytes: float = 8.0
    """Bytes of AdamW's two moments of a trained value."""
    host_embeddings: bool = False
    """The frozen embedding table, but one that the head is tied to, and those of each layer are in host memory."""
    mesh: MeshShape = field(default_factory=MeshShape)
    """How the GPUs share the work."""
    dtype: Any = jnp.bfloat16
    """Dtype of activations and frozen weights; trained parameters are float32."""

    attention: str = "auto"
    """Attention's backend."""
    tile: int | None = None
    """Tokens that pass through a layer at a time, apart from attention; None for all."""
    exact: bool = False
    """Tokens have the bits that sampling gives them (`PackedContext.exact`)."""
    objective: Objective = SUPERVISED
    """Its answers, if it has some, share their prompt."""
    reference: bool = False
    """The frozen layers run once more, without adapters, for the objective."""
    other_models: int = 0
    """Bytes of other models on the GPU, such as a teacher, and of images beside the text."""
    host_tower: bool = False
    """A frozen tower is in host memory, and on the GPU only while it runs, between steps."""
    tower: "TowerWork | None" = None
    """Images whose tower runs in each step; None where there are none, or their features are kept."""
    targets: float = 1.0
    """Share of the tokens with a loss, about, in rows that have a bound of them (`Batch.room`)."""
    batches_known: bool = False
    """Batches are known before the weights, which tell the shapes of a step's programs."""

    def __post_init__(self):
        if self.lora is None and not FORMATS[self.config.quantize].trains:
            raise ValueError(f"quantize={self.config.quantize} holds frozen weights, and all train: use adapters")
        trains = self.lora is None or "embed_tokens" in self.lora.modules_to_save
        tied = self.config.tie_word_embeddings and self.config.per_layer is None
        if self.host_embeddings and (trains or tied):
            raise ValueError(
                "embeddings on the host need a frozen table to which the output projection is not tied, or embeddings "
                "for each layer"
            )

    @property
    def any_rows(self) -> "Workload":
        """Return the workload that stands for all which differ in their rows only: parameters are the same."""
        return replace(
            self,
            objective=SUPERVISED,
            reference=False,
            seq_len=1,
            tile=None,
            exact=False,
            document_lengths=(),
            targets=1.0,
            other_models=0,
            tower=None,
        )

    @property
    def compiled_ahead(self) -> bool:
        """Return whether all programs of a step are compiled before the first one runs, unless they are of groups."""
        splits = self.mesh.fsdp > 1 or self.mesh.context > 1 or self.config.vision is not None
        return self.batches_known and not (splits or self.host_embeddings or self.reference)

    @property
    def tokens(self) -> int:
        """Return the tokens of one micro-batch on one GPU."""
        return self.batch_size * self.row_tokens

    @property
    def row_tokens(self) -> int:
        """Return the tokens of a row on one GPU."""
        return max(self.seq_len // self.mesh.context, 1)

    @property
    def micro_batches(self) -> tuple[MicroBatches, ...]:
        """Return the documents of micro-batches, by attention's kernels."""
        return sample_micro_batches(self.document_lengths, seq_len=self.seq_len, batch_size=self.batch_size)

    @property
    def visible_keys(self) -> float:
        """Return the mean number of keys that a query attends to."""
        return mean_visible_keys(np.minimum(self.document_lengths or (self.seq_len,), self.seq_len))

    @property
    def trainable_type(self) -> Any:
        """Return the filter of the variables that train."""
        if self.lora is not None:
            return nnx.LoRAParam
        return nnx.Param if self.config.vision is None else TrainedParams(self.config.vision)

    @property
    def weight_dtype(self) -> Any:
        """Return the dtype in which the model's own weights are stored, where they are not quantized."""
        return jnp.float32 if self.lora is None else self.dtype


def abstract_parts(workload: Workload) -> tuple[ModelGraphDefs, Params, Params]:
    """Return (graphdefs, trainable, frozen) of `split_model`, with shapes and dtypes for arrays; not to be changed."""
    return _abstract_parts(workload.config, workload.lora, workload.weight_dtype, workload.trainable_type)


@lru_cache(maxsize=8)
def _abstract_parts(
    config: DecoderConfig, lora: LoraConfig | None, dtype: Any, trainable: Any
) -> tuple[ModelGraphDefs, Params, Params]:
    """Build one layer of each kind, since a whole model takes seconds, and repeat its parts for all layers.

    Where adapters differ between layers, all are built.
    """
    alike = config.first_of_kind if lora is None or lora.is_uniform else tuple(range(config.num_hidden_layers))
    kinds = sorted(set(alike))

    def build():
        model = build_model(config.with_layers(kinds), dtype=dtype, rngs=nnx.Rngs(0))
        if lora is not None:
            add_lora(model, lora, rngs=nnx.Rngs(0))
        return model

    graphdefs, *trees = split_model(nnx.eval_shape(build), trainable)
    order = [kinds.index(first) for first in alike]
    train, frozen = ({**tree, "layers": [tree["layers"][kind] for kind in order]} for tree in trees)
    return replace(graphdefs, layers=tuple(graphdefs.layers[kind] for kind in order)), train, frozen


def parameter_counts(workload: Workload) -> tuple[int, int]:
    """Count (all parameters, those that train)."""
    moe = workload.config.moe
    parts = FORMATS[moe.quantize].parts if moe else {}
    trained, frozen = (_count(tree, parts) for tree in abstract_parts(workload)[1:])
    return trained + frozen, trained


def _count(tree: Params, per_item: Mapping[str, int]) -> int:
    """Count parameters, of which an item of an array with this key holds so many."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)
    return sum(per_item.get(path[-1].key, 1) * math.prod(leaf.shape) for path, leaf in leaves)


def tree_bytes(tree: Any) -> int:
    """Sum the bytes of a tree's arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
