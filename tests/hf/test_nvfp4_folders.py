"""Folders in NVFP4 as compressed-tensors packs them; golden by tests/goldens/make_nvfp4.py."""

import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.checkpoint import open_checkpoint, read_config, save_tensors
from jaxglue.hf.export import save_model
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model
from jaxglue.hf.merge import MergedTensors, export_adapter
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, quantized_names, split_model
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, quantize_matrix
from jaxglue.ops.quant.nvfp4 import encode_nvfp4

GOLDENS = Path(__file__).parents[1] / "goldens"
NVFP4 = FORMATS["nvfp4"]
ENTRY = NVFP4.config() | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
MATRIX = "model.layers.1.mlp.down_proj.weight"


def store(name, matrix):
    """Return the tensors of a matrix."""
    weight = quantize_matrix(matrix, "nvfp4")
    parts = weight.codes, weight.scales, weight.divisors[:1]
    return dict(zip((f"{name}_{part}" for part in ("packed", "scale", "global_scale")), parts, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config):
    """A folder whose linear layers are in NVFP4."""
    raw = {**tiny_config, "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    plain = flatten_names(split_model(random_model(config_from_hf(raw), dtype=jnp.float32), nnx.Param)[1])
    stored = {}
    for name, x in plain.items():
        stored |= store(name, x) if "_proj" in name else {name: x}
    save_tensors(folder := tmp_path_factory.mktemp("nvfp4") / "model", stored)
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": ENTRY}))
    return folder


def test_values_are_those_of_modelopt():
    files, made = TensorFiles([GOLDENS / "modelopt.safetensors"]), FORMATS["nvfp4_modelopt"]
    matrix, expected = files.read("matrix"), files.read("values")
    read = jax.tree.map(jnp.asarray, made.find(files, "weight", matrix.shape).read(files))
    np.testing.assert_array_equal(dequantize(read, jnp.float32), expected)
    ours = encode_nvfp4(jnp.asarray(matrix), read.scales, read.divisors[0])
    np.testing.assert_array_equal(dequantize(ours, jnp.float32), expected)
    stored = made.tensors("weight", ours)
    assert {name: (x.shape, x.dtype) for name, x in stored.items()} == {
        name: (files.tensors[name].shape, files.tensors[name].dtype) for name in stored
    }
    fitted = np.asarray(dequantize(made.quantize(jnp.asarray(matrix)), jnp.float32))
    errors = [np.square(values - matrix.astype(np.float32)).sum() for values in (fitted, expected)]
    assert errors[0] < 0.95 * errors[1], "scales of least square error"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_values_are_those_of_compressed_tensors(dtype):
    files = TensorFiles([GOLDENS / "nvfp4.safetensors"])
    expected = files.read("values")
    weight = jax.tree.map(jnp.asarray, NVFP4.find(files, "weight", expected.shape).read(files))
    found = np.asarray(dequantize(weight, dtype)).astype(np.float32)
    assert np.unique(np.abs(found)).size > 100
    if dtype == jnp.float32:
        assert (found.astype(jnp.bfloat16) == expected).all()
    else:
        np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_a_folder_loads_as_it_is(folder):
    model, files = load_model(folder, dtype=jnp.float32), open_checkpoint(folder)
    assert model.config.quantize == "nvfp4" and len(quantized_names(model)) == 2 * 7
    weight = model.layers[1].mlp.down_proj.weight.get_value()
    np.testing.assert_array_equal(weight.codes, files.read(f"{MATRIX}_packed"))
    assert np.isfinite(nnx.jit(lambda model: model(jnp.arange(16)[None]))(model)).all()


def test_an_adapter_merges_into_it(folder, tmp_path):
    name, config, rng = (
        MATRIX.removesuffix(".weight"),
        LoraConfig(rank=2, targets=("down_proj",)),
        np.random.default_rng(0),
    )
    tensors = {}
    for path in (name, name.replace("1", "0")):
        tensors[f"{path}.lora_A"] = rng.normal(size=(2, 96)).astype(np.float32)
        tensors[f"{path}.lora_B"] = rng.normal(size=(64, 2)).astype(np.float32)
    save_adapter(tmp_path / "adapter", tensors, config, str(folder), identify(folder))
    check = export_adapter(tmp_path / "adapter", folder, tmp_path / "merged")
    assert check.kl <= check.limit and "quantization_config" not in read_config(tmp_path / "merged")
    base = dequantize(load_model(folder).layers[1].mlp.down_proj.weight.get_value(), jnp.bfloat16).astype(jnp.float32)
    expected = base + config.scale * tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "merged").read(MATRIX), expected.astype(jnp.bfloat16))


@repeats_parts_of("test_a_folder_loads_as_it_is")
def test_experts_one_by_one_are_expanded(tmp_path):
    source, sizes = tmp_path / "plain", {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32}
    raw = read_config(GOLDENS / "qwen3_moe_mixed") | sizes
    drawn = flatten_names(split_model(random_model(config_from_hf(raw), dtype=jnp.float32), nnx.Param)[1])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_model(source, drawn, tmp_path)
    plain, files = load_model(source, dtype=jnp.float32), open_checkpoint(source)
    stored = {}
    for name in files.tensors:
        array = jnp.asarray(files.read(name))
        stored |= store(name, array) if name.endswith("_proj.weight") else {name: array}
    experts = [name for name in stored if ".experts." in name and name.endswith("_packed")]
    assert experts
    save_tensors(tmp_path / "model", stored)
    (tmp_path / "model/config.json").write_text(json.dumps(raw | {"quantization_config": ENTRY}))
    model = load_model(tmp_path / "model", dtype=jnp.float32)
    first, second = (each.layers[1].mlp.experts.gate_up_proj.weight.get_value() for each in (model, plain))
    assert 0.01 < np.linalg.norm(first - second) / np.linalg.norm(second) < 0.15
    merged, name = MergedTensors(tmp_path / "model"), experts[0].removesuffix("_packed")
    shape = files.tensors[name].shape
    expected = dequantize(quantize_matrix(jnp.asarray(files.read(name)), "nvfp4"), jnp.bfloat16)
    assert merged.specs[name].shape == shape and not [x for x in merged.specs if x.endswith("_packed")]
    chex.assert_trees_all_equal(merged.read(name), np.asarray(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MATRIX}_scale"), "is in NVFP4: expected .*down_proj.weight_scale beside"),
        (lambda t: t.update({f"{MATRIX}_packed": t[f"{MATRIX}_packed"].astype(np.int8)}), "is int8, expected uint8"),
        (
            lambda t: t.update({f"{MATRIX}_scale": t[f"{MATRIX}_scale"][1:]}),
            r"is \[63, 6\], config.json says \[64, 6\]",
        ),
    ],
)
def test_damaged_folders_are_refused(folder, tmp_path, change, message):
    files = open_checkpoint(folder)
    tensors = {name: files.read(name) for name in files.tensors}
    change(tensors)
    save_tensors(tmp_path / "model", tensors)
    shutil.copy(folder / "config.json", tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "model")
