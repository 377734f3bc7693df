"""Folders whose linear layers are in FP8, as compressed-tensors, DeepSeek and Qwen write them."""

import json
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from selection import repeats_parts_of

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.checkpoint import open_checkpoint, read_config, save_tensors
from jaxglue.hf.experts import checkpoint_layout
from jaxglue.hf.export import quantize_folder
from jaxglue.hf.export_check import folder_parts
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, quantized_names, split_model
from jaxglue.ops.quant.fp8 import E4M3, dequantize_fp8, is_multiplied_in_fp8, quantize_fp8

GOLDENS = Path(__file__).parents[1] / "goldens"
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SKIPPED = {"modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}
FORMATS = {
    "channel": COMPRESSED | {"ignore": ["lm_head"]},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "block": DEEPSEEK | SKIPPED,
}
MATRIX = "model.layers.1.mlp.down_proj.weight"


def store(name, matrix, how):
    """Return the tensors of a matrix, and its values."""
    module, (out, columns) = name.removesuffix("weight"), matrix.shape
    if how == "channel":
        weight = quantize_fp8(matrix)
        return {name: weight.values, f"{module}weight_scale": weight.scales[:, None].astype(jnp.bfloat16)}
    blocks = (1, 1) if how == "tensor" else (-(-out // 128), -(-columns // 128))
    scales = 0.001 * (1 + np.arange(blocks[0] * blocks[1], dtype=np.float32).reshape(blocks))
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:out, :columns] if how == "block" else scales
    codes = jnp.clip(matrix / spread, -448, 448).astype(E4M3)
    if how == "block":
        return {name: codes, f"{module}weight_scale_inv": jnp.asarray(scales)}
    one = jnp.asarray(scales.reshape(()))
    return {name: codes, f"{module}weight_scale": one, f"{module}input_scale": one}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_config):
    """Model folders by format, whose widths no block divides, and their tensors."""
    raw = {**tiny_config, "model_type": "qwen3", "intermediate_size": 208, "num_hidden_layers": 2}
    config, made = config_from_hf(raw), {}
    plain = flatten_names(split_model(random_model(config, dtype=jnp.float32), nnx.Param)[1])
    linears = [name for name in plain if "_proj.weight" in name]
    for how, quantization in FORMATS.items():
        stored = {name: x for name, x in plain.items() if name not in linears}
        for name in linears:
            stored |= store(name, plain[name], how)
        folder = tmp_path_factory.mktemp(how) / "model"
        save_tensors(folder, stored)
        (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
        made[how] = folder, stored
    return made


def weights(model) -> dict:
    flat = {".".join(["model", *map(str, path)]): v.get_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    return {name: flat[name] for name in quantized_names(model)}


def values(stored, name):
    """Compute the definition: codes times the scale of their tensor, channel or block."""
    codes, module = np.asarray(stored[name], np.float32), name.removesuffix("weight")
    if (blocks := stored.get(f"{module}weight_scale_inv")) is None:
        return codes * np.asarray(stored[f"{module}weight_scale"], np.float32)
    return codes * np.repeat(np.repeat(np.asarray(blocks), 128, 0), 128, 1)[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize("how", FORMATS)
def test_folders_load_as_they_are(folders, how):
    folder, stored = folders[how]
    found = weights(load_model(folder, dtype=jnp.float32))
    assert len(found) == 2 * 7
    for name, weight in found.items():
        assert not is_multiplied_in_fp8(weight)
        np.testing.assert_array_equal(np.asarray(weight.values, np.float32), np.asarray(stored[name], np.float32))
        np.testing.assert_array_equal(dequantize_fp8(weight, jnp.float32), values(stored, name))


@pytest.mark.parametrize("how", FORMATS)
def test_matmul_fp8_multiplies_their_codes(folders, how):
    folder, stored = folders[how]
    for name, weight in weights(load_model(folder, dtype=jnp.float32, quantize="fp8")).items():
        expected = values(stored, name)
        assert is_multiplied_in_fp8(weight) and weight.scales.shape == (len(expected),)
        error = np.linalg.norm(dequantize_fp8(weight, jnp.float32) - expected) / np.linalg.norm(expected)
        assert error < (0.04 if how == "block" else 1e-7)  # scales of rows round blocks again


@pytest.mark.parametrize("quantize", ["none", "fp8"])
@pytest.mark.parametrize("how", FORMATS)
def test_exports_are_checked_on_the_weights_that_are_trained(folders, how, quantize):
    folder, _ = folders[how]
    config = config_from_hf(read_config(folder)).quantized(quantize)
    _, (part,) = folder_parts(folder, config, dtype=jnp.float32)(1)
    model = load_model(folder, dtype=jnp.float32, quantize=quantize)
    chex.assert_trees_all_equal(part["mlp"]["down_proj"]["weight"], weights(model)[MATRIX])


def test_an_adapter_merges_into_a_folder_in_fp8(folders, tmp_path):
    folder, stored = folders["channel"]
    shape, rng, config = stored[MATRIX].shape, np.random.default_rng(0), LoraConfig(rank=2, targets=("down_proj",))
    tensors = {}
    for path in (MATRIX.removesuffix(".weight").replace("1", str(layer)) for layer in range(2)):
        tensors[f"{path}.lora_A"] = rng.normal(size=(2, shape[1])).astype(np.float32)
        tensors[f"{path}.lora_B"] = rng.normal(size=(shape[0], 2)).astype(np.float32)
    save_adapter(tmp_path / "adapter", tensors, config, str(folder), identify(folder))
    export_adapter(tmp_path / "adapter", folder, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    module = MATRIX.removesuffix(".weight")
    expected = values(stored, MATRIX) + config.scale * tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
    np.testing.assert_allclose(merged[MATRIX].astype(np.float32), expected, rtol=1e-2, atol=1e-2)
    assert f"{module}.weight_scale" not in merged


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, tiny_config):
    """A mixture of experts in FP8: its folder, config.json without quantization, and tensors."""
    moe = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "num_hidden_layers": 1}
    raw = {**tiny_config, **moe, "model_type": "qwen3_moe"}
    plain = flatten_names(split_model(random_model(config_from_hf(raw), dtype=jnp.float32), nnx.Param)[1])
    stored = {}
    for name, (parameter, index) in checkpoint_layout({name: x.shape for name, x in plain.items()}, raw).items():
        matrix = plain[parameter][index]
        stored |= store(name, matrix, "block") if name.endswith("_proj.weight") else {name: matrix}
    folder = tmp_path_factory.mktemp("mixture") / "model"
    save_tensors(folder, stored)
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": FORMATS["block"]}))
    return folder, raw, stored


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_experts_expand_on_load(mixture, memory):
    folder, raw, stored = mixture
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    model = load_model(folder, dtype=jnp.float32, place=lambda *_: sharding)
    found = flatten_names(split_model(model, nnx.Param)[1])
    experts = {name: x.shape for name, x in found.items() if ".experts." in name}
    for part, (name, index) in checkpoint_layout(experts, raw).items():
        expected = values(stored, part).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(found[name][index], expected)


def test_experts_stay_as_they_are_where_layers_are_multiplied_in_fp8(mixture):
    folder, raw, stored = mixture
    mlp = load_model(folder, dtype=jnp.float32, quantize="fp8").layers[0].mlp
    stacks = {name: getattr(mlp.experts, name).weight.get_value() for name in ("gate_up_proj", "down_proj")}
    assert all(stack.rows.values.dtype == E4M3 for stack in stacks.values())
    shapes = {f"model.layers.0.mlp.experts.{name}": stack.shape for name, stack in stacks.items()}
    for part, (name, index) in checkpoint_layout(shapes, raw).items():
        found = stacks[name.rpartition(".")[2]].dequantize(jnp.float32)[index]
        np.testing.assert_array_equal(found, values(stored, part))


LATENT = {
    **{"kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 136},
    **{"n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"num_hidden_layers": 2, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "head_dim": None},
    **{"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
}


def test_folders_of_latent_attention_load_as_published(tmp_path, tiny_config):
    """Of DeepSeek-V3: all of its projections and experts in blocks of FP8, and a layer that predicts further tokens."""
    raw = {**tiny_config, **LATENT}
    plain = flatten_names(split_model(random_model(config_from_hf(raw), dtype=jnp.float32), nnx.Param)[1])
    stored, shapes = {}, {name: x.shape for name, x in plain.items()}
    for name, (parameter, index) in checkpoint_layout(shapes, raw).items():
        matrix = plain[parameter][index]
        stored |= store(name, matrix, "block") if "_proj" in name else {name: matrix}
    stored["model.layers.1.mlp.gate.e_score_correction_bias"] = jnp.zeros(2)
    further = {name.replace("layers.1.", "layers.2."): x for name, x in stored.items() if "layers.1." in name}
    save_tensors(
        tmp_path / "model", stored | further | store("model.layers.2.eh_proj.weight", jnp.ones((8, 8)), "block")
    )
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"quantization_config": DEEPSEEK}))
    model = load_model(tmp_path / "model", dtype=jnp.float32)
    found = weights(model)
    assert len(found) == 5 + 3 + 5 + 3  # of two attentions, a dense feed-forward, and a shared one
    for name, weight in found.items():
        np.testing.assert_array_equal(dequantize_fp8(weight, jnp.float32), values(stored, name))
    expert = values(stored, "model.layers.1.mlp.experts.1.down_proj.weight")
    experts = flatten_names(split_model(model, nnx.Param)[1])["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(experts[1], expert.astype(jnp.bfloat16).astype(np.float32))
    rounded = load_model(tmp_path / "model", quantize="fp8").layers[1].mlp.experts.down_proj.weight.get_value()
    assert rounded.rows.values.dtype == E4M3
    assert np.linalg.norm(rounded.dequantize(jnp.float32)[1] - expert) < 0.04 * np.linalg.norm(expert)


def test_a_merged_mixture_has_no_fp8(mixture, tmp_path):
    folder, _, stored = mixture
    q_proj, config = "model.layers.0.self_attn.q_proj", LoraConfig(rank=2, targets=("q_proj",))
    out, columns = stored[f"{q_proj}.weight"].shape
    tensors = {f"{q_proj}.lora_A": np.ones((2, columns), np.float32), f"{q_proj}.lora_B": np.ones((out, 2), np.float32)}
    save_adapter(tmp_path / "adapter", tensors, config, str(folder), identify(folder))
    export_adapter(tmp_path / "adapter", folder, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {str(x.dtype) for name, x in merged.items() if "_proj" in name} == {"bfloat16"}
    expert = "model.layers.0.mlp.experts.2.up_proj.weight"
    np.testing.assert_array_equal(merged[expert], values(stored, expert).astype(jnp.bfloat16))
    assert not any("scale" in name for name in merged)


def test_other_tools_folders_load_without_their_caches_scales(folders, tmp_path):
    def change(stored, quantization):
        quantization |= {"quant_method": "modelopt", "quant_algo": "FP8"}
        stored |= {f"model.layers.{i}.self_attn.{kind}": jnp.ones(()) for i in range(2) for kind in CACHE_SCALES}

    model = load_model(broken(folders, tmp_path, "tensor", change), dtype=jnp.float32)
    stored = folders["tensor"][1]
    np.testing.assert_array_equal(dequantize_fp8(weights(model)[MATRIX], jnp.float32), values(stored, MATRIX))


def broken(folders, tmp_path, how, change) -> str:
    folder, stored = folders[how]
    stored, raw = dict(stored), json.loads((folder / "config.json").read_text())
    change(stored, raw["quantization_config"])
    save_tensors(tmp_path / "model", stored)
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    return str(tmp_path / "model")


SCALE = MATRIX.replace("weight", "weight_scale")
CACHE_SCALES = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.v_scale")


@pytest.mark.parametrize(
    ("how", "change", "message"),
    [
        ("channel", lambda t, q: t.pop(SCALE), r"is in FP8: expected .*down_proj\.weight_scale or"),
        ("channel", lambda t, q: t.update({SCALE: t[SCALE][1:]}), r"weight_scale in .* is \[\d+, 1\], expected one of"),
        ("channel", lambda t, q: q.update(format="pack-quantized"), "format 'pack-quantized' .* is not read"),
        ("channel", lambda t, q: q.update(quant_method="modelopt", quant_algo="NVFP4"), "says nvfp4 .* is float8"),
        ("channel", lambda t, q: q.update(config_groups={"group_0": None}), "'float-quantized' .* is not read"),
        ("block", lambda t, q: q.update(modules_to_not_convert=1), "expected a list of names, got 1"),
        ("channel", lambda t, q: q.clear(), "is in FP8, of which config.json says nothing"),
        ("channel", lambda t, q: t.update({MATRIX: t[MATRIX].astype(jnp.bfloat16)}), "is bfloat16, and the folder's"),
        ("block", lambda t, q: q.update(weight_block_size=[64, 64]), r"weight_block_size \[64, 64\]"),
        (
            "block",
            lambda t, q: q.update(modules_to_not_convert=["model.layers.0.mlp.up_proj"]),
            "up_proj.weight is in FP8, but config.json leaves it unquantized",
        ),
        ("channel", lambda t, q: q.update(ignore=["re:(a+)+$"]), r"the pattern '\(a\+\)\+\$' cannot be read"),
    ],
)
def test_other_folders_are_refused(folders, tmp_path, how, change, message):
    with pytest.raises(ValueError, match=message):
        load_model(broken(folders, tmp_path, how, change), dtype=jnp.float32)


@pytest.mark.parametrize("entry", ["model.layers.1.mlp.down_proj", r"re:.*\.1\.mlp\.down_proj$"])
def test_modules_that_the_folder_skips_keep_their_values(folders, tmp_path, entry):
    matrix = jax.random.normal(jax.random.key(0), folders["channel"][1][MATRIX].shape)

    def change(tensors, quantization):
        tensors.pop(SCALE)
        tensors[MATRIX] = matrix
        quantization["ignore"] = ["lm_head", "re:.*mlp.gate$", entry]

    model = load_model(folder := broken(folders, tmp_path, "channel", change), dtype=jnp.float32)
    assert len(weights(model)) == 2 * 7 - 1
    np.testing.assert_array_equal(model.layers[1].mlp.down_proj.weight.get_value(), matrix)
    assert len(weights(load_model(folder, quantize="fp8"))) == 2 * 7


@pytest.fixture(scope="module")
def written(tmp_path_factory, tiny_config):
    """A model folder, and the same written in FP8."""
    path = tmp_path_factory.mktemp("written")
    raw = {**tiny_config, "model_type": "qwen3", "num_hidden_layers": 2}
    save_tensors(path / "model", flatten_names(split_model(random_model(config_from_hf(raw)), nnx.Param)[1]))
    (path / "model" / "config.json").write_text(json.dumps(raw))
    quantize_folder(path / "model", path / "fp8", "fp8", max_shard_bytes=40_000)
    return path / "model", path / "fp8"


@pytest.mark.parametrize("quantize", ["none", "fp8"])
def test_a_written_folder_equals_rounding_while_loading(written, quantize):
    plain, folder = written
    stored = weights(load_model(folder, quantize=quantize))
    for name, weight in weights(load_model(plain, quantize="fp8")).items():
        chex.assert_trees_all_equal(stored[name], replace(weight, expand=quantize == "none"))
    scale = open_checkpoint(folder).tensors[SCALE]
    assert (scale.shape, scale.dtype) == ((len(stored[MATRIX].values), 1), np.float32)


@repeats_parts_of("test_a_merged_mixture_has_no_fp8")
def test_experts_are_written_in_fp8_one_by_one(tmp_path):
    source = GOLDENS / "qwen3_moe_mixed"
    quantize_folder(source, tmp_path / "fp8", "fp8")
    files, plain = (open_checkpoint(folder) for folder in (tmp_path / "fp8", source))
    linears = [name for name in plain.tensors if name.endswith("_proj.weight")]
    assert {name for name, info in files.tensors.items() if info.dtype == E4M3} == set(linears)
    model, original = (load_model(folder, dtype=jnp.float32) for folder in (tmp_path / "fp8", source))
    first, second = (each.layers[1].mlp.experts.down_proj.weight.get_value() for each in (model, original))
    assert 0.001 < np.linalg.norm(first - second) / np.linalg.norm(second) < 0.04


def test_stacked_experts_are_not_written_in_fp8(tmp_path):
    with pytest.raises(ValueError, match=r"experts\.\w+_proj holds all experts, which fp8 cannot hold"):
        quantize_folder(GOLDENS / "gpt_oss", tmp_path / "fp8", "fp8")
