"""A run's weights, loaded into parameter trees at its start."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxglue.data.progress import DataProgress
from jaxglue.engine.host_table import embeddings_to_host
from jaxglue.engine.residency import DEVICE, HOST, MAPPED
from jaxglue.engine.transfer import commit, pinned_host
from jaxglue.hf.adapter_tensors import SCORE
from jaxglue.hf.loading import load_model, random_model, set_adapter
from jaxglue.models import build_model
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import MODULES, PATHS
from jaxglue.models.parameters import PER_LAYER_TABLE, ModelGraphDefs, Params, split_model
from jaxglue.models.vocabulary import grow_vocabulary
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.run import Setup

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def build_parameters(run: Setup, layout: Layout = SINGLE_DEVICE) -> tuple[ModelGraphDefs, Params, Params]:
    """Load, or draw, (graphdefs, trainable, frozen): trainable in float32, frozen in the compute dtype."""
    base, workload = run.base, run.workload
    dtype = workload.weight_dtype
    rows_change = run.vocabulary.changes or bool(workload.lora and workload.lora.trainable_token_indices)
    whole = () if workload.lora is None else workload.lora.modules_to_save
    tied = run.model.tie_word_embeddings
    frozen_ends = [] if tied else [f"{PATHS[name]}." for name in ("embed_tokens", "lm_head") if name not in whole]
    frozen_ends += [] if run.model.per_layer is None else [PER_LAYER_TABLE]
    # Rows are added and taken on the device.
    on_host = frozen_ends if workload.host_embeddings and not rows_change else []
    place = partial(place_layers, run.remat.weights, layout=layout, on_host=on_host)
    if base.random:
        model = random_model(base.architecture, dtype=dtype, seed=base.seed, place=place)
    else:
        trained = [SCORE, *(f"{PATHS[module]}.weight" for module in whole)]
        model = load_model(
            base.folder,
            dtype=dtype,
            place=place,
            dtypes=dict.fromkeys(trained, jnp.float32),
            expand_experts=base.expand_experts,
            quantize=base.storage,
            fp8_experts=base.fp8_experts,
            labels=run.model.labels if run.model.scores else 0,
            seed=base.seed,
            score_tokens=run.objective.score_tokens(run.tokenizer, run.recorded.data.system),
            untied=not run.model.tie_word_embeddings,
            vision=run.model.vision,
            progress=DataProgress() if jax.process_index() == 0 else None,
            mapped=lambda name: place_of(run.remat.weights, name) == MAPPED,
        )
    if run.vocabulary.changes:
        grow_vocabulary(model, run.vocabulary.new, run.vocabulary.size)
    if workload.lora is not None:
        add_lora(model, workload.lora, rngs=nnx.Rngs(base.seed))
    if base.adapter is not None:
        set_adapter(model, base.adapter)
    graphdefs, trainable, frozen = split_model(model, workload.trainable_type)
    if run.vocabulary.changes:
        frozen |= layout.put({name: frozen[name] for name in MODULES if name in frozen})
    if workload.host_embeddings:
        frozen = embeddings_to_host(frozen)
    return graphdefs, commit(layout.put(trainable)), commit(frozen)


def new_adapters(run: Setup) -> tuple[ModelGraphDefs, Params, Any]:
    """Return (graphdefs, trainable, shapes of the frozen parameters) of adapters as they begin; load no weights.

    Raises:
        ValueError: values that train begin with the base's.
    """
    lora, config = run.workload.lora, run.model
    if (
        lora is None
        or lora.dora
        or lora.modules_to_save
        or lora.trainable_token_indices
        or run.base.adapter
        or config.scores
    ):
        raise ValueError("base: adapters alone share the weights of another session: leave the other settings out")
    kept: list[Any] = []

    def build() -> Params:
        model = build_model(config, dtype=run.workload.weight_dtype, rngs=nnx.Rngs(0))
        add_lora(model, lora, rngs=nnx.Rngs(run.base.seed))
        graphdefs, trainable, frozen = split_model(model, run.workload.trainable_type)
        kept.extend((graphdefs, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), frozen)))
        return trainable

    trainable = jax.jit(build)()  # in which XLA leaves out the weights
    return kept[0], commit(trainable), kept[1]


def place_layers(
    weights: Sequence[str], name: str, value: Any, layout: Layout = SINGLE_DEVICE, *, on_host: Sequence[str] = ()
) -> Any:
    """Return the sharding of the named parameter: pinned host memory for its layer's place, or beginnings `on_host`."""
    shardings = layout.place(name, value)
    if place_of(weights, name) != HOST and not name.startswith(tuple(on_host)):
        return shardings
    pinned = pinned_host(jax.local_devices()[0])
    return pinned if shardings is None else jax.tree.map(lambda s: s.with_memory_kind(pinned.memory_kind), shardings)


def place_of(weights: Sequence[str], name: str) -> str:
    """Return the place of the named parameter by those of the layers (see `residency`)."""
    match = _LAYER.match(name)
    return weights[int(match[1])] if match else DEVICE
