"""What is trained, as shapes: everything that a plan is made of."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxglue.data.batch import Batch
from jaxglue.models import build_model
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import CausalLM
from jaxglue.models.lora import LoraConfig, add_lora
from jaxglue.models.parameters import ModelGraphDefs, Params, split_model
from jaxglue.ops.rope import rope_tables
from jaxglue.ops.segments import PackedSegments
from jaxglue.planner.planned_context import PlannedContext
from jaxglue.sharding.mesh import MeshShape


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, in the shapes that decide time and memory."""

    config: DecoderConfig
    batch_size: int
    """Rows of a micro-batch on one GPU."""
    seq_len: int
    lora: LoraConfig | None
    """None trains all weights."""
    visible_keys: float
    """Mean number of keys that a query attends to (see `mean_visible_keys`)."""
    gradient_accumulation_steps: int = 1
    update_in_backward: bool = False
    """Each layer's weights are updated as soon as their gradients are there (`Executor.loss_and_update`)."""
    moment_bytes: float = 8.0
    """Of AdamW's two moments of a trained value."""
    host_embeddings: bool = False
    """The frozen embedding table is in the host's memory."""
    mesh: MeshShape = field(default_factory=MeshShape)
    """How the GPUs share the work."""
    dtype: Any = jnp.bfloat16
    """Of activations and frozen weights; what trains is float32."""

    def __post_init__(self):
        if self.lora is None and self.config.quantize != "none":
            raise ValueError(f"quantize={self.config.quantize} holds frozen weights, and all train: use adapters")
        if self.host_embeddings and (self.lora is None or self.config.tie_word_embeddings):
            raise ValueError("embeddings on the host need a frozen table to which the output projection is not tied")

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one GPU."""
        return self.batch_size * self.seq_len


def abstract_model(config: DecoderConfig, lora: LoraConfig | None, dtype) -> CausalLM:
    """The model with its adapters, if it gets any; shapes and dtypes in place of arrays."""

    def build():
        model = build_model(config, dtype=dtype, rngs=nnx.Rngs(0))
        if lora is not None:
            add_lora(model, lora, rngs=nnx.Rngs(0))
        return model

    return nnx.eval_shape(build)


def abstract_parts(workload: Workload) -> tuple[ModelGraphDefs, Params, Params]:
    """(graphdefs, trainable, frozen) of `split_model`, with shapes and dtypes for arrays."""
    full = workload.lora is None
    model = abstract_model(workload.config, workload.lora, jnp.float32 if full else workload.dtype)
    return split_model(model, nnx.Param if full else nnx.LoRAParam)


def abstract_batch(workload: Workload) -> Batch:
    """A micro-batch; one segment slot in a row."""
    shape = (workload.batch_size, workload.seq_len)
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    bounds: Any = jax.ShapeDtypeStruct((shape[0], 2), jnp.int32)
    segments = PackedSegments(segment_ids=ids, positions=ids, starts=ids, ends=ids, cu_seqlens=bounds)
    return Batch(tokens=ids, targets=ids, loss_weights=weights, segments=segments)


def abstract_input(workload: Workload) -> tuple[jax.ShapeDtypeStruct, PlannedContext]:
    """A layer's input and context."""
    config, segments = workload.config, abstract_batch(workload).segments
    x = jax.ShapeDtypeStruct((workload.batch_size, workload.seq_len, config.hidden_size), workload.dtype)
    cos, sin = jax.eval_shape(lambda p: rope_tables(p, config.rope, config.head_dim), segments.positions)
    return x, PlannedContext(segments=segments, cos=cos, sin=sin)
