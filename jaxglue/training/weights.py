"""A run's weights: loaded into parameter trees at its start, and exported at its end."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxglue.engine.host_table import embeddings_to_host
from jaxglue.engine.transfer import commit, is_streamed, pinned_host
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.export import on_host, save_model
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model, set_adapter
from jaxglue.models.lora import add_lora
from jaxglue.models.parameters import ModelGraphDefs, Params, flatten_names, split_model
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.setup import Setup
from jaxglue.training.start_adapter import base_identity

_MOST_KEPT = 2**30
"""Largest random model that is written beside its adapter, in bytes."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def build_parameters(setup: Setup, layout: Layout = SINGLE_DEVICE) -> tuple[ModelGraphDefs, Params, Params]:
    """Load, or draw, (graphdefs, trainable, frozen): trainable in float32, frozen in the compute dtype."""
    config, workload, seed = setup.config, setup.workload, setup.config.data.seed
    dtype = workload.weight_dtype
    place = partial(layers_on_host, layout=layout) if setup.remat.stream_weights else layout.place
    if config.model.random_weights:
        model = random_model(setup.model, dtype=dtype, seed=seed, place=place)
    else:
        options: dict[str, Any] = {"expand_experts": config.model.expand_experts, "quantize": config.model.storage}
        model = load_model(config.model.folder, dtype=dtype, place=place, **options)
    if workload.lora is not None:
        add_lora(model, workload.lora, rngs=nnx.Rngs(seed))
    if setup.adapter is not None:
        set_adapter(model, setup.adapter)
    graphdefs, trainable, frozen = split_model(model, workload.trainable_type)
    if workload.host_embeddings:
        frozen = embeddings_to_host(frozen)
    return graphdefs, commit(layout.put(trainable)), commit(frozen)


def layers_on_host(name: str, value: Any, layout: Layout = SINGLE_DEVICE) -> Any:
    """Return the sharding of the parameter of this name: pinned host memory for a streamed layer's."""
    shardings = layout.place(name, value)
    match = _LAYER.match(name)
    if match is None or not is_streamed(int(match[1])):
        return shardings
    pinned = pinned_host(jax.local_devices()[0])
    return pinned if shardings is None else jax.tree.map(lambda s: s.with_memory_kind(pinned.memory_kind), shardings)


def export_result(setup: Setup, trainable: Params, frozen: Params, folder: Path, *, write: bool = True) -> Path:
    """Write the adapter, or the whole model, into the run's folder; return its path.

    An adapter on random weights comes with these as the folder `base`, if they are small and stored unquantized.
    All processes must call it, as each has a part of the arrays; one of them writes.
    """
    tensors, base, config = flatten_names(trainable), setup.config.model.folder, setup.config
    if config.model.method == "full":
        dtype = jnp.float32 if config.model.dtype == "float32" else jnp.bfloat16
        save_model(folder / "model", tensors, base, dtype=dtype, write=write)
        return folder / "model"
    if drawn := _is_kept(setup, frozen):
        save_model(folder / "base", flatten_names(frozen), base, write=write)
    adapter = {name: on_host(tensor) for name, tensor in tensors.items()}
    if write:
        identity = identify(folder / "base") if drawn else base_identity(config, setup.model)
        save_adapter(folder / "adapter", adapter, config.lora, folder / "base" if drawn else base, identity)
        setup.tokenizer.save_pretrained(folder / "adapter")
    return folder / "adapter"


def _is_kept(setup: Setup, frozen: Params) -> bool:
    """Tell whether a run writes its frozen weights, which no folder holds."""
    plain = not (setup.remat.stream_weights or setup.workload.host_embeddings) and setup.model.quantize == "none"
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    return setup.config.model.random_weights and plain and size <= _MOST_KEPT
