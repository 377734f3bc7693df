import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.engine.transfer import PINNED, pinned_host
from jaxglue.hf import loading
from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.hf.checkpoint import open_checkpoint, save_tensors
from jaxglue.hf.experts import find_source
from jaxglue.hf.export import save_model
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.models import config_from_hf
from jaxglue.models.file_param import FileParam
from jaxglue.models.parameters import abstract_parameters, flatten_names, split_model
from jaxglue.training.weights import place_layers

GOLDENS = Path(__file__).parents[1] / "goldens"
RAW = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
    "tie_word_embeddings": True,
}


def parameters(model):
    return flatten_names(split_model(model, lambda path, value: True)[1])


def test_a_saved_model_loads_in_the_wanted_dtype(tmp_path):
    model = random_model(config_from_hf(RAW), dtype=jnp.float32, seed=3)
    save_tensors(tmp_path / "model", parameters(model))
    (tmp_path / "model" / "config.json").write_text(json.dumps(RAW))
    loaded = parameters(load_model(tmp_path / "model", dtype=jnp.bfloat16))
    assert loaded.keys() == abstract_parameters(model).keys()
    for name, value in parameters(model).items():
        np.testing.assert_array_equal(loaded[name], value.astype(jnp.bfloat16), err_msg=name)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_parameters_load_to_their_shardings(tmp_path, quantize):
    raw = {**RAW, "intermediate_size": 128}
    config, host = config_from_hf(raw), pinned_host(jax.devices()[0])
    save_tensors(tmp_path / "model", parameters(random_model(config, dtype=jnp.float32, seed=3)))
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))

    def place(name, value=None):
        return host if name.startswith("model.layers.") else None

    drawn = random_model(replace(config, quantize=quantize), dtype=jnp.float32, seed=3, place=place)
    loaded = load_model(tmp_path / "model", dtype=jnp.float32, quantize=quantize, place=place)
    here = load_model(tmp_path / "model", dtype=jnp.float32, quantize=quantize)
    for model in (drawn, loaded):
        chex.assert_trees_all_equal(*(jax.device_get(parameters(m)) for m in (model, here)))
        kinds = {name: value.sharding.memory_kind for name, value in parameters(model).items()}
        assert {name for name, kind in kinds.items() if kind == PINNED} == set(filter(place, kinds))


@pytest.mark.parametrize("folder", ["llama_yarn", "qwen3_moe"])
def test_every_parameter_is_copied_once_to_its_place(folder, monkeypatch):
    copied: dict[str, int] = {}

    def counting(copy, size):
        def count(*args, **options):
            result = copy(*args, **options)
            kind = result.sharding.memory_kind if isinstance(result, jax.Array) else "other"
            copied[kind] = copied.get(kind, 0) + size(result)
            return result

        return count

    monkeypatch.setattr(jax, "make_array_from_callback", counting(jax.make_array_from_callback, lambda x: x.nbytes))
    monkeypatch.setattr(loading, "put_on_mesh", counting(loading.put_on_mesh, lambda x: x.nbytes))
    host, on_host = pinned_host(jax.devices()[0]), ("model.layers.1.", "lm_head.", "model.embed_tokens.")
    place = partial(place_layers, ("device", "host"), on_host=on_host)
    model = parameters(load_model(GOLDENS / folder, dtype=jnp.float32, place=place))
    in_place = dict.fromkeys(copied, 0)
    for name, value in model.items():
        assert (value.sharding.memory_kind == host.memory_kind) == name.startswith(on_host)
        in_place[value.sharding.memory_kind] += value.nbytes
    assert copied == in_place


@pytest.mark.parametrize(
    ("folder", "dtype"),
    [
        ("llama_yarn", jnp.float32),
        ("llama_yarn", jnp.bfloat16),
        ("qwen3_moe", jnp.float32),
        ("nf4_folder", jnp.bfloat16),
        ("int8_folder", jnp.bfloat16),
        ("gpt_oss_mxfp4", jnp.bfloat16),
    ],
)
def test_mapped_parameters_stay_in_the_files(folder, dtype):
    check_mapped(GOLDENS / folder, dtype=dtype, is_view=folder == "llama_yarn" and dtype == jnp.float32)


def check_mapped(folder, *, dtype, is_view=False):
    """Compare a model whose layers stay in their files with the same in memory."""
    loaded = state(load_model(folder, dtype=dtype))
    mapped = state(load_model(folder, dtype=dtype, mapped=lambda name: name.startswith("model.layers.")))
    for path, value in mapped.items():
        assert isinstance(value, FileParam) == (path[0] == "layers")
        if isinstance(value, FileParam):
            read = value.read()
            chex.assert_trees_all_equal(jax.tree.map(jnp.asarray, read), loaded[path])
            assert not is_view or (isinstance(read, np.ndarray) and not read.flags.owndata)
            assert value.nbytes > 0


def state(model):
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def test_mapped_parameters_are_not_quantized():
    with pytest.raises(ValueError, match=r"q_proj\.weight is to be quantized and cannot stay in its file"):
        load_model(GOLDENS / "qwen3_tied", quantize="int8", mapped=lambda name: "q_proj" in name)


def test_random_weights_follow_the_config_and_the_seed():
    config = config_from_hf({**RAW, "initializer_range": 0.5})
    first, second, other = (parameters(random_model(config, dtype=jnp.float32, seed=seed)) for seed in (0, 0, 1))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith(".bias"):
            assert (value == 0).all()
        else:
            assert float(value.std()) == pytest.approx(0.5, rel=0.1)
            assert not np.allclose(value, other[name])
    keys = [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)]
    assert not np.allclose(first[keys[0]], first[keys[1]])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "layers.1.mlp.down_proj",
            "layers.7.mlp.down_proj",
            "model.layers.7.mlp.down_proj, missing from the base",
        ),
        (
            "mlp.down_proj",
            "mlp.down_projection",
            "it adapts model.layers.0.mlp.down_projection, .*, missing from the base",
        ),
    ],
)
def test_adapter_that_does_not_fit_is_refused_by_name(tmp_path, old, new, message):
    adapter = load_adapter(GOLDENS / "adapter")
    config, tensors = adapter.config, adapter.tensors
    save_adapter(tmp_path / "other", {name.replace(old, new): array for name, array in tensors.items()}, config, "x")
    with pytest.raises(ValueError, match=message):
        add_adapter(load_model(GOLDENS / "qwen3_tied"), tmp_path / "other")


def test_only_needed_rows_are_read(tmp_path):
    raw = {**RAW, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    whole = parameters(random_model(config_from_hf(raw), dtype=jnp.float32))
    save_tensors(tmp_path / "stacked", whole)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(raw))
    save_model(tmp_path / "split", whole, tmp_path / "base")  # a tensor for each expert
    for folder in ("stacked", "split"):
        files = open_checkpoint(tmp_path / folder)
        for name in ("model.embed_tokens.weight", "model.layers.1.mlp.experts.gate_up_proj"):
            rows = find_source(files, name, whole[name].shape).read_rows(files, 1, 3)
            np.testing.assert_array_equal(rows, whole[name][1:3])


def test_mapped_files_that_change_are_refused(tmp_path):
    shutil.copytree(GOLDENS / "llama_yarn", tmp_path, dirs_exist_ok=True)
    model = load_model(tmp_path, dtype=jnp.float32, mapped=lambda name: name.startswith("model.layers."))
    value = next(value for value in state(model).values() if isinstance(value, FileParam))
    file = tmp_path / "model.safetensors"
    file.rename(tmp_path / "old")
    value.read()
    os.truncate(tmp_path / "old", 1000)
    with pytest.raises(ValueError, match=r"model.safetensors was changed while it was in use"):
        value.read()
