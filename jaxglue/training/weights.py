"""A run's weights: loaded into parameter trees at its start, and exported at its end."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedTokenizerBase

from jaxglue.engine.host_table import embeddings_to_host
from jaxglue.engine.residency import DEVICE
from jaxglue.engine.transfer import commit, pinned_host
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.export import on_host, save_model
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model, set_adapter
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import add_lora
from jaxglue.models.parameters import ModelGraphDefs, Params, flatten_names, split_model
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.config import TrainConfig
from jaxglue.training.setup import Setup
from jaxglue.training.start_adapter import base_identity

_MOST_KEPT = 2**30
"""Largest random model that is written beside its adapter, in bytes."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Exportable(Protocol):
    """The parts of a run that its exported weights need."""

    @property
    def config(self) -> TrainConfig:
        """Return the run's settings."""

    @property
    def model(self) -> DecoderConfig:
        """Return the model's shape."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, with the run's chat template."""


def build_parameters(setup: Setup, layout: Layout = SINGLE_DEVICE) -> tuple[ModelGraphDefs, Params, Params]:
    """Load, or draw, (graphdefs, trainable, frozen): trainable in float32, frozen in the compute dtype."""
    config, workload, seed = setup.config, setup.workload, setup.config.data.seed
    dtype = workload.weight_dtype
    place = partial(place_layers, setup.remat.weights, layout=layout)
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


def place_layers(weights: Sequence[str], name: str, value: Any, layout: Layout = SINGLE_DEVICE) -> Any:
    """Return the sharding of the parameter of this name: pinned host memory where its layer is streamed."""
    shardings = layout.place(name, value)
    match = _LAYER.match(name)
    if match is None or weights[int(match[1])] == DEVICE:
        return shardings
    pinned = pinned_host(jax.local_devices()[0])
    return pinned if shardings is None else jax.tree.map(lambda s: s.with_memory_kind(pinned.memory_kind), shardings)


def export_result(
    run: Exportable, trainable: Params, output: Path, kept_base: Path | None = None, *, write: bool = True
) -> Path:
    """Write the adapter, or the whole model, to a folder; return it.

    All processes must call it, as each has a part of the arrays; one of them writes.

    Args:
        run: the weights' run.
        trainable: its trained parameters.
        output: the folder.
        kept_base: folder of random base weights, from `keep_base`.
        write: False on processes that only contribute their shards.
    """
    tensors, base, config = flatten_names(trainable), run.config.model.folder, run.config
    if config.model.method == "full":
        dtype = jnp.float32 if config.model.dtype == "float32" else jnp.bfloat16
        save_model(output, tensors, base, dtype=dtype, write=write)
        return output
    adapter = {name: on_host(tensor) for name, tensor in tensors.items()}
    if write:
        identity = identify(kept_base) if kept_base else base_identity(config, run.model)
        save_adapter(output, adapter, config.lora, kept_base or base, identity)
        run.tokenizer.save_pretrained(output)
    return output


def keep_base(setup: Setup, frozen: Params, folder: Path, *, write: bool = True) -> Path | None:
    """Write an adapter's random base weights to a folder; None unless they are small and stored unquantized."""
    plain = not (setup.remat.streams_weights or setup.workload.host_embeddings) and setup.model.quantize == "none"
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    random = setup.config.model.random_weights and setup.config.model.method == "lora"
    if not (random and plain and size <= _MOST_KEPT):
        return None
    save_model(folder, flatten_names(frozen), setup.config.model.folder, write=write)
    return folder
