"""Quantized folders, read and written in bitsandbytes' format."""

import json
import shutil
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxglue.hf.adapter import save_adapter, warn_of_adapter_inside
from jaxglue.hf.checkpoint import read_config, save_tensors
from jaxglue.hf.export import quantize_folder, save_model
from jaxglue.hf.export_check import CHECK_FILE
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.hf.tensor_files import write_shards
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import abstract_parameters, flatten_names, quantized_names, set_parameters, split_model
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, is_quantized, quantize_matrix
from jaxglue.ops.segments import pack_segments
from tests.selection import repeat, repeats_parts_of

GOLDENS = Path(__file__).parents[1] / "goldens"
MATRIX = "model.layers.1.mlp.down_proj.weight"
HOWS = ("nf4", "int8")


def weights(model) -> dict:
    """Return every quantized matrix by name."""
    flat = nnx.to_flat_state(nnx.state(model))
    found = {".".join(["model", *map(str, path)]): variable.get_value() for path, variable in flat}
    return {name: weight for name, weight in found.items() if is_quantized(weight)}


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden folder, to modify."""

    def copy(how: str) -> Path:
        return shutil.copytree(GOLDENS / f"{how}_folder", tmp_path / how)

    return copy


def test_published_nf4_folder_gives_transformers_logits():
    golden = load_file(GOLDENS / "nf4_folder/golden.safetensors")
    model = load_model(GOLDENS / "nf4_folder", dtype=jnp.float32)
    tokens = golden["tokens"]
    segments = pack_segments([[tokens.shape[1]]], seq_len=tokens.shape[1])
    logits = nnx.jit(lambda model: model(jnp.asarray(tokens), segments))(model)
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", HOWS)
def test_reading_then_writing_is_lossless(how):
    """Compare every tensor bit for bit, and the JSON state."""
    path = GOLDENS / f"{how}_folder"
    model, theirs = load_model(path, dtype=jnp.float32), load_file(path / "model.safetensors")
    assert len(weights(model)) == 2 * 7
    assert model.config.quantize == how
    for name, weight in weights(model).items():
        for part, ours in FORMATS[how].tensors(name, weight).items():
            spec = FORMATS[how].specs(name, weight.shape)[part]
            assert (ours.dtype, ours.shape) == (spec.dtype, spec.shape)
            if "quant_state" in part:
                assert json.loads(ours.tobytes()) == json.loads(theirs[part].tobytes())
            else:
                np.testing.assert_array_equal(ours, theirs[part], err_msg=part, strict=True)


@pytest.mark.parametrize("how", HOWS)
def test_quantizing_the_original_gives_the_same_matrix(how):
    original = jnp.asarray(load_file(GOLDENS / "nf4_folder/golden.safetensors")[MATRIX])
    if how == "int8":  # bitsandbytes casts to float16 first
        original = original.astype(jnp.float16)
    stored = weights(load_model(GOLDENS / f"{how}_folder", dtype=original.dtype))[MATRIX]
    chex.assert_trees_all_equal(quantize_matrix(original, how), stored)


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_config):
    """A model folder with sizes divisible by NF4 blocks."""
    folder = tmp_path_factory.mktemp("original") / "model"
    raw = {**tiny_config, "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = random_model(config_from_hf(raw), dtype=jnp.bfloat16)
    save_tensors(folder, flatten_names(split_model(model, nnx.Param)[1]))
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("how", HOWS)
def test_quantized_folder_equals_quantizing_while_loading(original, tmp_path, how):
    quantize_folder(original, tmp_path / how, how, max_shard_bytes=40_000)
    assert len(list((tmp_path / how).glob("*.safetensors"))) > 2
    stored, quantized = load_model(tmp_path / how), load_model(original, quantize=how)
    chex.assert_trees_all_equal(nnx.state(stored), nnx.state(quantized))
    assert quantized_names(stored) == quantized_names(quantized)
    assert abstract_parameters(stored) == abstract_parameters(quantized)
    assert load_model(tmp_path / how, quantize=how).config.quantize == how


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"quantization_config": raw["quantization_config"] | changes}))


STATE = f"{MATRIX}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("how", "change", "message"),
    [
        ("nf4", {MATRIX: lambda a: a[:-1]}, rf"{MATRIX} in model.safetensors is \[4095, 1\].* \[4096, 1\]"),
        ("nf4", {f"{MATRIX}.nested_absmax": None}, rf"1 missing: {MATRIX}.nested_absmax"),
        (
            "nf4",
            {f"{MATRIX}.quant_map": lambda a: a / 2},
            r"model.safetensors: its quant_map .* copy the file again, or",
        ),
        (
            "nf4",
            {f"{MATRIX}.absmax": lambda a: a.astype(np.int32)},
            "absmax in .*: its dtype is int32, expected uint8",
        ),
        ("nf4", {STATE: lambda a: a[:-9]}, r"its quant_state cannot be read .* quantize the original model again"),
        ("nf4", {STATE: lambda a: np.frombuffer(a.tobytes().replace(b"64", b"32"), np.uint8)}, "quant_state says"),
        ("int8", {MATRIX: lambda a: a.astype(np.int32)}, "dtype is int32, expected int8"),
        ("int8", {f"{MATRIX[:-6]}weight_format": lambda a: np.array(1, np.uint8)}, "weight_format"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, how, change, message):
    def apply(tensors):
        for name, edit in change.items():
            array = tensors.pop(name)
            if edit is not None:
                tensors[name] = edit(array)

    rewrite(path := folder(how), apply)
    with pytest.raises(ValueError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"bnb_4bit_quant_type": "fp4"},
            "says fp4, double quantization True; only nf4, True is read: use the original model folder",
        ),
        ({"bnb_4bit_use_double_quant": False}, "double quantization False"),
        (
            {"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"]},
            r"model.layers.0.mlp.\w+.weight is in NF4, but config.json leaves it unquantized",
        ),
        ({"quant_method": "awq"}, "quant_method 'awq' in config.json is not supported: use the original model folder"),
    ],
)
def test_other_formats_are_refused(folder, changes, message):
    reconfigure(path := folder("nf4"), **changes)
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_requantizing_a_quantized_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--quantize int8: the model folder is already quantized to nf4"):
        load_model(GOLDENS / "nf4_folder", quantize="int8")
    for name, method in (("nf4_folder", "bitsandbytes"), ("gpt_oss_mxfp4", "mxfp4")):
        with pytest.raises(ValueError, match=rf"is already quantized \({method}\) and a folder holds one format"):
            quantize_folder(GOLDENS / name, tmp_path / "again", "nf4")
    with pytest.raises(ValueError, match="quantize must be one of none, nf4, int8, fp8, got 'nf5'"):
        load_model(GOLDENS.parent / "goldens/qwen3_tied", quantize="nf5")


@pytest.mark.parametrize("how", HOWS)
def test_a_config_that_contradicts_the_tensors_is_refused(original, tmp_path, how):
    folder = shutil.copytree(original, tmp_path / "stale")
    stale = {"quantization_config": FORMATS[how].config()}
    (folder / "config.json").write_text(json.dumps(read_config(original) | stale))
    message = rf"says {how} in its quantization_config, but model\S+ in model.safetensors is bfloat16: take"
    with pytest.raises(ValueError, match=message):
        load_model(folder)
    name = "model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A": np.ones((2, 64), np.float32), f"{name}.lora_B": np.ones((64, 2), np.float32)}
    save_adapter(tmp_path / "adapter", tensors, LoraConfig(rank=2, targets=("q_proj",)), str(folder))
    with pytest.raises(ValueError, match=message):
        export_adapter(tmp_path / "adapter", folder, tmp_path / "merged")
    for name in ("nf4_folder", "int8_folder"):
        raw = read_config(shutil.copytree(GOLDENS / name, tmp_path / name))
        del raw["quantization_config"]
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
        with pytest.raises(
            ValueError, match=r"is in (NF4|INT8), of which config.json says nothing: add .*bitsandbytes"
        ):
            load_model(tmp_path / name)


@repeats_parts_of("test_an_adapter_merges_into_a_dynamic_folder")
@pytest.mark.parametrize("how", ["nf4", repeat("int8")])
def test_an_adapter_is_merged_into_the_weights_that_it_was_trained_on(original, tmp_path, how):
    config, rng = LoraConfig(rank=2, targets=("q_proj",)), np.random.default_rng(0)
    name = "model.layers.0.self_attn.q_proj"
    shape = load_file(original / "model.safetensors")[f"{name}.weight"].shape
    tensors = {}
    for layer in range(read_config(original)["num_hidden_layers"]):
        path = name.replace("0", str(layer))
        tensors[f"{path}.lora_A"] = rng.normal(size=(2, shape[1])).astype(np.float32)
        tensors[f"{path}.lora_B"] = rng.normal(size=(shape[0], 2)).astype(np.float32)
    quantize_folder(original, tmp_path / how, how)
    save_adapter(tmp_path / "adapter", tensors, config, str(original), {**identify(original), "quantize": how})
    bases = original, tmp_path / how
    checks = [export_adapter(tmp_path / "adapter", base, tmp_path / f"merged-{base.name}") for base in bases]
    assert all(check.storage == how and check.kl <= check.limit for check in checks)
    merged, folder = (load_file(tmp_path / f"merged-{base}/model.safetensors") for base in (original.name, how))
    weight = load_model(tmp_path / how, dtype=jnp.float32).layers[0].self_attn.q_proj.weight.get_value()
    expected = dequantize(weight, jnp.float32) + config.scale * tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
    np.testing.assert_allclose(merged[f"{name}.weight"].astype(np.float32), expected, rtol=1e-2, atol=1e-2)
    assert "quantization_config" not in read_config(tmp_path / f"merged-{how}")
    assert merged.keys() == folder.keys()
    plain = export_adapter(tmp_path / "adapter", original, tmp_path / "plain", storage="none")
    assert plain.storage == "none"


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", MATRIX])
def test_weights_that_are_not_finite_are_not_exported(original, tmp_path, name):
    tensors = load_file(original / "model.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[0] = np.nan
    folder = shutil.copytree(original, tmp_path / "bad")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} holds values that are not finite"):
        quantize_folder(folder, tmp_path / "nf4", "nf4")
    assert not (tmp_path / "nf4").exists()


def test_an_adapter_inside_a_model_folder_is_named(original, tmp_path, caplog):
    folder = shutil.copytree(original, tmp_path / "both")
    (folder / "adapter_config.json").write_text("{}")
    quantize_folder(folder, tmp_path / "nf4", "nf4")
    warn_of_adapter_inside(folder, folder)
    warn_of_adapter_inside(original)
    assert [record.message for record in caplog.records] == [
        f"{folder} also holds an adapter, which is not used: name it with --adapter, or move it away"
    ]


@nnx.jit
def forward(model, tokens):
    return model(tokens)


SKIPPED = {0: ("self_attn.q_proj",), 1: ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
"""Linear layers by layer that Unsloth's dynamic quantization might leave in bfloat16."""


@pytest.fixture(scope="module")
def dynamic(original, tmp_path_factory):
    """A folder in NF4 whose skipped modules are unquantized, named like in Unsloth's folders."""
    folder = tmp_path_factory.mktemp("dynamic") / "model"
    quantize_folder(original, folder, "nf4")
    tensors, plain = load_file(folder / "model.safetensors"), load_file(original / "model.safetensors")
    for name in (f"model.layers.{layer}.{linear}.weight" for layer, linears in SKIPPED.items() for linear in linears):
        tensors = {part: array for part, array in tensors.items() if not part.startswith(name)} | {name: plain[name]}
    save_file(tensors, folder / "model.safetensors")
    names = ["lm_head", "multi_modal_projector", "merger", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp"]
    reconfigure(folder, llm_int8_skip_modules=names)
    return folder


def test_modules_that_a_dynamic_folder_skips_keep_their_values(dynamic, original):
    model, plain = load_model(dynamic, dtype=jnp.float32), load_model(original, dtype=jnp.float32)
    found, values = weights(model), flatten_names(split_model(plain, nnx.Param)[1])
    skipped = {f"model.layers.{layer}.{linear}.weight" for layer, linears in SKIPPED.items() for linear in linears}
    assert weights(load_model(original, quantize="nf4")).keys() - found.keys() == skipped
    assert model.config.first_of_kind == (0, 1)
    values |= {name: dequantize(weight, jnp.float32) for name, weight in found.items()}
    tokens = jnp.arange(16)[None]
    found, expected = (forward(each, tokens) for each in (model, set_parameters(plain, values)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_merges_into_a_dynamic_folder(dynamic, original, tmp_path):
    name, config = "model.layers.1.mlp.down_proj", LoraConfig(rank=2, targets=("down_proj",))
    rng, shape = np.random.default_rng(0), load_file(original / "model.safetensors")[f"{name}.weight"].shape
    tensors = {}
    for path in (name, name.replace("1", "0")):
        tensors[f"{path}.lora_A"] = rng.normal(size=(2, shape[1])).astype(np.float32)
        tensors[f"{path}.lora_B"] = rng.normal(size=(shape[0], 2)).astype(np.float32)
    record = {"quantize": "nf4", "unquantized": ",".join(load_model(dynamic).config.unquantized)}
    save_adapter(tmp_path / "adapter", tensors, config, str(dynamic), identify(dynamic) | record)
    check = export_adapter(tmp_path / "adapter", dynamic, tmp_path / "merged")
    again = export_adapter(tmp_path / "adapter", original, tmp_path / "original")
    assert check.kl <= check.limit and again.storage == "nf4"
    others = load_file(tmp_path / "original/model.safetensors")
    chex.assert_trees_all_equal(load_file(tmp_path / "merged/model.safetensors"), others)
    merged, plain = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", original))
    assert merged.keys() == plain.keys() and "quantization_config" not in read_config(tmp_path / "merged")
    delta = config.scale * tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
    expected = plain[f"{name}.weight"].astype(np.float32) + delta  # not rounded to NF4 before
    np.testing.assert_array_equal(merged[f"{name}.weight"], expected.astype(jnp.bfloat16))


def test_a_module_neither_skipped_nor_quantized_is_refused(dynamic, tmp_path):
    reconfigure(folder := shutil.copytree(dynamic, tmp_path / "less"), llm_int8_skip_modules=["model.layers.1"])
    with pytest.raises(ValueError, match=r"q_proj.weight in .* is bfloat16, and the folder's other linear layers"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "how"), [repeat("qwen3_tied", "nf4"), ("qwen3_moe", "fp8"), repeat("gpt_oss", "mxfp4")]
)
def test_a_quantized_folder_is_read_back_and_fails_where_it_differs(tmp_path, monkeypatch, name, how):
    base, sizes = tmp_path / "base", ("hidden_size", "intermediate_size", "moe_intermediate_size")
    raw = read_config(GOLDENS / name) | dict.fromkeys(sizes, 64) | {"head_dim": 16, "initializer_range": 0.2}
    model = random_model(config_from_hf(raw), dtype=jnp.float32)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_model(base, flatten_names(split_model(model, nnx.Param)[1]), tmp_path)
    check, distance = quantize_folder(base, tmp_path / "good", how)
    assert check.kl <= check.limit and distance > 10 * check.kl
    assert json.loads((tmp_path / "good" / CHECK_FILE).read_text())["kl"] == check.kl

    def damage(folder, specs, read, *options):
        def reads(tensor):
            matrix = specs[tensor].dtype.itemsize == 1 and len(specs[tensor].shape) > 1
            return np.flip(read(tensor)) if matrix else read(tensor)

        write_shards(folder, specs, reads, *options)

    monkeypatch.setattr("jaxglue.hf.export.write_shards", damage)
    with pytest.raises(ValueError, match=r"does not predict as its origin: .*; the export failed"):
        quantize_folder(base, tmp_path / "bad", how)
    assert not (tmp_path / "bad").exists()
