"""Models loaded from Hugging Face folders, or initialized with random weights."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxglue.data.progress import DataProgress
from jaxglue.hf.adapter import Adapter, load_adapter, vocabulary_matrix
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.adapter_tensors import SCORE
from jaxglue.hf.checkpoint import HEAD, find_tensors, load_tensors, open_checkpoint, read_config, untie_files
from jaxglue.hf.experts import expand
from jaxglue.hf.identity import Identity
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import CausalLM
from jaxglue.models.family import find_family
from jaxglue.models.lora import add_lora, base_shapes
from jaxglue.models.lora_config import PATHS
from jaxglue.models.parameters import abstract_parameters, hf_name, quantized_names, set_parameters
from jaxglue.models.tower_config import TowerConfig
from jaxglue.models.vocabulary import untie, vocabulary_modules
from jaxglue.ops.choices import Storage
from jaxglue.ops.quant.formats import FORMATS, Quantized, format_of
from jaxglue.ops.quant.served import is_sensitive
from jaxglue.ops.quant.stack import Stack, hold_matrices, matrix_of
from jaxglue.sharding.mesh import put_on_mesh

_LAYERS = "model.layers."
Placement = Callable[[str, Any], Any]
"""Maps a parameter's Hugging Face name and value to its sharding, one per part if quantized; None: default device."""


def load_model(
    folder: str | Path,
    *,
    dtype=jnp.bfloat16,
    expand_experts: bool = False,
    quantize: Storage = "none",
    fp8_experts: bool = False,
    place: Placement | None = None,
    dtypes: Mapping[str, Any] | None = None,
    labels: int = 0,
    seed: int = 0,
    score_tokens: Sequence[int] | None = None,
    mapped: Callable[[str], bool] = lambda name: False,
    untied: bool = False,
    vision: TowerConfig | None = None,
    progress: DataProgress | None = None,
) -> CausalLM:
    """Load a model from a local Hugging Face folder, streaming weights to their devices in `dtype`.

    Args:
        folder: config.json and safetensors.
        dtype: of all weights except MXFP4 experts.
        expand_experts: also expand MXFP4 experts to `dtype`.
        quantize: `nf4`, `int8` or `fp8` quantizes the decoder layers' linear layers while loading; `none` keeps the
            folder's format.
        fp8_experts: multiply MXFP4 experts in FP8.
        place: sharding of each parameter; read directly into place unless quantized while loading.
        dtypes: other dtypes of some parameters, by name.
        labels: scores of a reward model or classifier; a folder without a score gets a random one. 0 for others.
        seed: of that.
        score_tokens: tokens whose rows of the output projection such a score has in place of random ones.
        mapped: whether the named parameter stays in the folder's files, to be read for each use (`FileParam`).
        untied: also give a tied folder's embedding to an output projection of its own.
        vision: shape of the vision tower, which is loaded with the text model; None leaves it in the files.
        progress: shows the bytes read; by default nothing does.

    Raises:
        ValueError: a bad folder, an unsupported config.json, mismatched tensors, or sizes not divisible by NF4 blocks;
            a mapped parameter that is to be quantized.
    """
    config = config_from_hf(read_config(folder))
    if expand_experts:
        config = config.expanded
    if labels:
        config = config.scored(labels)
    if untied:
        config = config.untied
    if vision is not None:
        config = vision.within(config)

    def load(specs: dict[str, jax.ShapeDtypeStruct], put: Put) -> dict[str, Any]:
        others = {name: specs[name].update(dtype=other) for name, other in (dtypes or {}).items() if name in specs}
        specs = specs | others
        if quantize != "none" and (name := next(filter(mapped, specs), None)):
            raise ValueError(f"{name} is to be quantized and cannot stay in its file: quantize the folder first")
        if quantize == "none" and config.quantize != "none":
            require_stored(folder, config)
        if not config.scores:
            return load_tensors(folder, specs, put, mapped=mapped, progress=progress)
        missing = {SCORE: specs.pop(SCORE)} if SCORE not in open_checkpoint(folder).tensors else {}
        if missing and score_tokens is not None:
            drawn = {SCORE: put(SCORE, _token_rows(folder, config, score_tokens, missing[SCORE].dtype))}
        else:
            drawn = _draw(missing, put, config, jax.random.key(seed))
        return load_tensors(folder, specs, put, ignored=(HEAD,), mapped=mapped, progress=progress) | drawn

    return _with_parameters(config.quantized(quantize, fp8_experts=fp8_experts), dtype, place, load)


def _token_rows(folder: str | Path, config: DecoderConfig, tokens: Sequence[int], dtype: Any) -> jax.Array:
    """Return rows of a folder's output projection, whose products are logits."""
    files = open_checkpoint(folder)
    untie_files(folder, files)
    rows = files.read(HEAD)[np.asarray(tokens)].astype(np.float32)
    return jnp.asarray(rows / config.scales.logit_divisor, dtype)


def check_weights(folder: str | Path, config: DecoderConfig) -> None:
    """Check the headers of a folder's files against an architecture; load nothing.

    Raises:
        ValueError: as `load_model` for missing, extra or misshaped tensors.
    """
    alike = config.first_of_kind
    kinds = sorted(set(alike))
    specs = abstract_parameters(abstract_model(config.with_layers(kinds)))
    ends = {name: spec for name, spec in specs.items() if not name.startswith(_LAYERS)}
    layers = [_layer_specs(specs, kinds.index(first), layer) for layer, first in enumerate(alike)]
    wanted = ends | {name: spec for layer in layers for name, spec in layer.items()}
    if config.scores and SCORE not in open_checkpoint(folder).tensors:
        wanted.pop(SCORE)
    find_tensors(folder, wanted, ignored=(HEAD,) if config.scores else ())


def _layer_specs(specs: Mapping[str, Any], kind: int, layer: int) -> dict[str, Any]:
    """Return the specs of one layer under the names of another."""
    old, new = f"{_LAYERS}{kind}.", f"{_LAYERS}{layer}."
    return {new + name.removeprefix(old): spec for name, spec in specs.items() if name.startswith(old)}


def random_model(
    config: DecoderConfig, *, dtype=jnp.bfloat16, seed: int = 0, place: Placement | None = None
) -> CausalLM:
    """Initialize a model as Hugging Face does: normal matrices, zero biases, unit norms.

    Compiles one program per parameter shape, at any depth.
    """
    return _with_parameters(config, dtype, place, lambda specs, put: _draw(specs, put, config, jax.random.key(seed)))


def require_stored(folder: str | Path, config: DecoderConfig) -> None:
    """Check that a folder holds all linear layers in its config's format, in which others would be rounded unasked.

    Raises:
        ValueError: it does not.
    """
    model, files, made = abstract_model(config), open_checkpoint(folder), FORMATS[config.quantize]
    linears, shapes = quantized_names(model), abstract_parameters(model)
    others = [name for name in files.tensors if name in linears and not made.find(files, name, shapes[name].shape)]
    if not others:
        return
    info, label = files.tensors[others[0]], made.label
    if len(others) == len(linears):
        raise ValueError(
            f"config.json in {folder} says {label} in its quantization_config, but {others[0]} in {info.file.name} is "
            f"{info.dtype}: take quantization_config out of config.json, or use the folder that it belongs to"
        )
    remedy = "round it too with --matmul fp8, or use" if label == "fp8" else "use"
    raise ValueError(
        f"{others[0]} in {info.file} is {info.dtype}, and the folder's other linear layers are in {label.upper()}, "
        f"which is not supported: {remedy} the original model folder"
    )


Put = Callable[[str, Any], jax.Array | Quantized]
"""Quantizes the named parameter's array if the model does, and places it."""
Fill = Callable[[dict[str, jax.ShapeDtypeStruct], Put], dict[str, Any]]
"""Produces every parameter of the given specs through `Put`."""


def _with_parameters(config: DecoderConfig, dtype, place: Placement | None, fill: Fill) -> CausalLM:
    model = abstract_model(config, dtype=dtype)
    quantized, made, one_stack = quantized_names(model), FORMATS[config.quantize], Lock()

    def put(name: str, array) -> jax.Array | Quantized:
        if isinstance(array, Stack) and name not in quantized:
            array = expand(array, array.dtype)
        elif isinstance(array, Quantized) and (name not in quantized or not made.accepts(matrix_of(array))):
            raise _unmentioned(name, matrix_of(array), config)
        sensitive = is_sensitive(name, config.num_hidden_layers)
        if name in quantized and len(array.shape) == 3:
            with one_stack:  # a stack of experts takes several times its size meanwhile
                array = jax.block_until_ready(hold_matrices(made, array, sensitive=sensitive))
        elif name in quantized:
            array = made.hold(array, sensitive=sensitive)
        return put_on_mesh(array, place and place(name, array))

    specs = abstract_parameters(model)
    if place is not None:
        parts = {name: place(name, spec) for name, spec in specs.items() if name not in quantized}
        specs |= {name: specs[name].update(sharding=sharding) for name, sharding in parts.items()}
    return set_parameters(model, fill(specs, put))


def _unmentioned(name: str, weight: Quantized, config: DecoderConfig) -> ValueError:
    found = format_of(weight)
    if isinstance(weight, FORMATS[config.quantize].weight or ()):
        found_in = f"{name} is in {found.label.upper()}"
        return ValueError(f"{found_in}, but config.json leaves it unquantized: take it out of the modules listed there")
    entry = f'"quantization_config": {json.dumps(found.config())}'
    return ValueError(f"{name} is in {found.label.upper()}, of which config.json says nothing: add {entry} to it")


def _draw(specs: dict[str, jax.ShapeDtypeStruct], put: Put, config: DecoderConfig, key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, len(specs))
    # One at a time, so that transfers to the host do not accumulate on the device.
    return {
        name: jax.block_until_ready(put(name, _initial(name, spec, config, key)))
        for (name, spec), key in zip(specs.items(), keys, strict=True)
    }


def _initial(name: str, spec: jax.ShapeDtypeStruct, config: DecoderConfig, key: jax.Array) -> jax.Array:
    experts = FORMATS[config.moe.quantize if config.moe else "none"]
    part, std = name.rpartition("_")[2], config.initializer_range
    if config.vision is not None and config.vision.owns(name):
        value = config.vision.initial(name, spec)
        return _normal(key, spec.shape, spec.dtype, config.vision.initializer_range) if value is None else value
    for mixer in config.mixer_kinds:
        if (value := mixer.initial(name, key, spec)) is not None:
            return value
    if name.endswith("bias"):
        return jnp.zeros(spec.shape, spec.dtype)
    if ".experts." in name and part in experts.parts:
        return experts.random_part(part, key, spec, std)
    if len(spec.shape) == 1 and not name.endswith("sinks"):
        parts = find_family(config.model_type).parts
        style = (parts.final_norm if name == "model.norm.weight" else None) or parts.norm
        return jnp.full(spec.shape, 1 - style.offset, spec.dtype)
    return _normal(key, spec.shape, spec.dtype, std)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype, std: float) -> jax.Array:
    return (jax.random.normal(key, shape) * std).astype(dtype)


def add_adapter(model: CausalLM, folder: str | Path, base: Identity | None = None, name: str = "the model") -> Adapter:
    """Add a folder's PEFT adapter to the model in place, and return it.

    Args:
        model: the base.
        folder: of the adapter.
        base: identity of the base; None for weights from memory.
        name: of the base, for messages.

    Raises:
        ValueError: not an adapter folder, or an adapter that does not fit (`check_adapter`).
    """
    identity, adapter = base or {"model_type": model.config.model_type}, load_adapter(folder)
    if adapter.adapted(model.config) != model.config:
        untie(model)
    adapter = check_adapter(adapter, base_shapes(model), identity, name)
    if adapter.scores and not model.config.scores:
        raise ValueError(f"{folder} is the adapter of a reward model, which scores texts and writes none")
    model.config = adapter.seeing(model.config)
    add_lora(model, adapter.linears.config, rngs=nnx.Rngs(0))
    set_adapter(model, adapter.linears)
    for module_name, module in vocabulary_modules(model):
        weight = module.weight.get_value()
        if (matrix := vocabulary_matrix(adapter, PATHS[module_name], weight)) is not None:
            module.weight = nnx.Param(jnp.asarray(matrix, weight.dtype))
    model.config = replace(model.config, vocab_size=max(model.config.vocab_size, adapter.vocab_size))
    return adapter


def set_adapter(model: CausalLM, adapter: Adapter) -> None:
    """Set the values of a model's adapters, which are on the modules of `adapter`, in place.

    Raises:
        ValueError: the model has adapters on other modules.
    """
    variables = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    named = {hf_name(".".join(map(str, path))): (path, variable) for path, variable in variables}
    if differing := sorted(named.keys() ^ adapter.tensors.keys()):
        raise ValueError(f"{adapter.folder} does not fit the model's adapters: {differing[0]} is in one of them only")
    flat = [(path, variable.replace(jnp.asarray(adapter.tensors[name]))) for name, (path, variable) in named.items()]
    nnx.update(model, nnx.from_flat_state(flat))
