"""Weights at both ends of a run: from a model folder to parameter trees, and from those to what other programs load."""

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
from jaxglue.hf.loading import load_model, random_model
from jaxglue.models.lora import add_lora
from jaxglue.models.parameters import ModelGraphDefs, Params, flatten_names, split_model
from jaxglue.sharding.layout import WHOLE, Layout
from jaxglue.training.setup import Setup, trainable_filter

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def build_parameters(setup: Setup, layout: Layout = WHOLE) -> tuple[ModelGraphDefs, Params, Params]:
    """(graphdefs, trainable, frozen), loaded or drawn; what trains in float32, the rest in the compute dtype."""
    config, seed = setup.config, setup.config.data.seed
    dtype = config.model.compute_dtype if config.model.method == "lora" else jnp.float32
    place = partial(layers_on_host, layout=layout) if setup.remat.stream_weights else layout.place
    if config.model.random_weights:
        model = random_model(setup.model, dtype=dtype, seed=seed, place=place)
    else:
        options: dict[str, Any] = {"expand_experts": config.model.expand_experts, "quantize": config.model.quantize}
        model = load_model(config.model.model, dtype=dtype, place=place, **options)
    if config.model.method == "lora":
        add_lora(model, config.lora, rngs=nnx.Rngs(seed))
    graphdefs, trainable, frozen = split_model(model, trainable_filter(config))
    if config.model.embeddings == "host":
        frozen = embeddings_to_host(frozen)
    return graphdefs, commit(layout.put(trainable)), commit(frozen)


def layers_on_host(name: str, value: Any, layout: Layout = WHOLE) -> Any:
    """Pinned memory for what is streamed, so that it never has to fit the GPU."""
    shardings = layout.place(name, value)
    match = _LAYER.match(name)
    if match is None or not is_streamed(int(match[1])):
        return shardings
    pinned = pinned_host(jax.local_devices()[0])
    return pinned if shardings is None else jax.tree.map(lambda s: s.with_memory_kind(pinned.memory_kind), shardings)


def export_result(setup: Setup, trainable: Params, folder: Path, *, write: bool = True) -> Path:
    """Writes the adapter, or the whole model, into the run's folder; returns where it is.

    Of several processes all must call it, each having a part of the arrays; one of them writes.
    """
    tensors, base = flatten_names(trainable), setup.config.model.model
    if setup.config.model.method == "full":
        dtype = jnp.float32 if setup.config.model.dtype == "float32" else jnp.bfloat16
        save_model(folder / "model", tensors, base, dtype=dtype, write=write)
        return folder / "model"
    adapter = {name: on_host(tensor) for name, tensor in tensors.items()}
    if write:
        save_adapter(folder / "adapter", adapter, setup.config.lora, base)
        setup.tokenizer.save_pretrained(folder / "adapter")
    return folder / "adapter"
