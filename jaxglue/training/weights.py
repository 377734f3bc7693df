"""A run's weights: loaded into parameter trees at its start, and exported at its end."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxglue.data.progress import DataProgress
from jaxglue.engine.host_table import embeddings_to_host
from jaxglue.engine.residency import DEVICE, HOST, MAPPED
from jaxglue.engine.transfer import commit, pinned_host
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.adapter_tensors import PATHS, SCORE
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export import describe_reward_model, on_host, save_model
from jaxglue.hf.files import write_json
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model, set_adapter
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import MODULES
from jaxglue.models.parameters import ModelGraphDefs, Params, flatten_names, split_model
from jaxglue.models.vocabulary import grow_vocabulary
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.config import TrainConfig
from jaxglue.training.new_tokens import Vocabulary
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
    def base(self) -> DecoderConfig:
        """Return the base's shape."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the tokenizer, with the run's chat template, and the model's rows."""


def build_parameters(setup: Setup, layout: Layout = SINGLE_DEVICE) -> tuple[ModelGraphDefs, Params, Params]:
    """Load, or draw, (graphdefs, trainable, frozen): trainable in float32, frozen in the compute dtype."""
    config, workload, seed = setup.config, setup.workload, setup.config.data.seed
    dtype = workload.weight_dtype
    rows_change = setup.vocabulary.changes or bool(workload.lora and workload.lora.trainable_token_indices)
    whole = () if workload.lora is None else workload.lora.modules_to_save
    frozen_ends = [f"{PATHS[name]}." for name in ("embed_tokens", "lm_head") if name not in whole]
    # Rows are added and taken on the device.
    on_host = frozen_ends if workload.host_embeddings and not rows_change else []
    place = partial(place_layers, setup.remat.weights, layout=layout, on_host=on_host)
    if config.model.random_weights:
        model = random_model(setup.base, dtype=dtype, seed=seed, place=place)
    else:
        options: dict[str, Any] = {"expand_experts": config.model.expand_experts, "quantize": config.model.storage}
        options["fp8_experts"] = config.model.fp8_experts
        trained = [SCORE, *(f"{PATHS[module]}.weight" for module in whole)]
        options |= {"dtypes": dict.fromkeys(trained, jnp.float32), "scores": setup.model.scores, "seed": seed}
        options["progress"] = DataProgress() if jax.process_index() == 0 else None
        options["mapped"] = lambda name: place_of(setup.remat.weights, name) == MAPPED
        model = load_model(config.model.folder, dtype=dtype, place=place, **options)
    if setup.vocabulary.changes:
        grow_vocabulary(model, setup.vocabulary.new, setup.vocabulary.size)
    if workload.lora is not None:
        add_lora(model, workload.lora, rngs=nnx.Rngs(seed))
    if setup.adapter is not None:
        set_adapter(model, setup.adapter)
    graphdefs, trainable, frozen = split_model(model, workload.trainable_type)
    if setup.vocabulary.changes:
        frozen |= layout.put({name: frozen[name] for name in MODULES if name in frozen})
    if workload.host_embeddings:
        frozen = embeddings_to_host(frozen)
    return graphdefs, commit(layout.put(trainable)), commit(frozen)


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
        finish = partial(_finish_folder, run)
        save_model(output, tensors, base, dtype=dtype, write=write, finish=finish, progress=DataProgress())
        return output
    adapter = {name: on_host(tensor) for name, tensor in tensors.items()}
    if write:
        identity = identify(kept_base) if kept_base else base_identity(config, run.base)
        tied = run.base.tie_word_embeddings
        save_adapter(output, adapter, config.lora, kept_base or base, identity, tied=tied)
        run.vocabulary.tokenizer.save_pretrained(output)
    return output


def keep_base(setup: Setup, frozen: Params, folder: Path, *, write: bool = True) -> Path | None:
    """Write an adapter's random base weights to a folder; None for other bases."""
    if not _has_random_base(setup):
        return None
    save_model(folder, flatten_names(frozen), setup.config.model.folder, write=write)
    return folder


def why_not_kept(setup: Setup, frozen: Params) -> str:
    """Return why an adapter's random base weights are not written; empty where they are, or are not random."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    reasons = {
        "weights in host memory": setup.remat.streams_weights or setup.workload.host_embeddings,
        "quantized weights": setup.model.quantize != "none",
        "new tokens": setup.vocabulary.changes,
        "--modules-to-save": setup.config.lora.modules_to_save,
        "a reward model": setup.model.scores,
        f"{size / 1e9:.1f} GB": size > _MOST_KEPT,
    }
    return next((reason for reason, holds in reasons.items() if holds and _has_random_base(setup)), "")


def _has_random_base(setup: Setup) -> bool:
    return setup.config.model.random_weights and setup.config.model.method == "lora"


def _finish_folder(run: Exportable, folder: Path) -> None:
    """Describe a reward model in a model folder; write a changed vocabulary's tokenizer, and its number of tokens."""
    vocabulary = run.vocabulary
    if run.config.objective.scores:
        describe_reward_model(folder, vocabulary.tokenizer)
    if vocabulary.changes:
        write_json(folder / "config.json", read_config(folder) | {"vocab_size": vocabulary.size})
        vocabulary.tokenizer.save_pretrained(folder)
