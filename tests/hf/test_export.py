import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from forked import Forked, run_script
from safetensors.numpy import load_file, save_file

from jaxglue.files.atomic import atomic_folder, temporary_prefix
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.export import quantize_folder, save_model
from jaxglue.hf.export_check import CHECK_FILE, compare, random_rows
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.hf.merge import Delta, export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.models.vocabulary import ROWS

ROOT = Path(__file__).parents[2]
CONFIG = LoraConfig(rank=2, alpha=8.0, targets=("q_proj",))
LINEAR = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


RAW = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    model = random_model(config_from_hf(RAW), dtype=jnp.bfloat16, seed=0)
    tensors = {name: np.asarray(value) for name, value in flatten_names(split_model(model, nnx.Param)[1]).items()}
    save_tensors(folder, tensors | {"model.norm.weight": np.ones(8, np.float32)})
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"file": name}))
    (folder / "config.json").write_text(json.dumps(RAW))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"not a part of the model")
    return folder


@pytest.fixture
def lora():
    rng = np.random.default_rng(1)
    return {
        "model.layers.0.self_attn.q_proj.lora_A": rng.normal(size=(2, 8)).astype(np.float32),
        "model.layers.0.self_attn.q_proj.lora_B": rng.normal(size=(8, 2)).astype(np.float32),
    }


@pytest.fixture
def adapter(tmp_path, lora):
    save_adapter(tmp_path / "adapter", lora, CONFIG, "base")
    return tmp_path / "adapter"


def test_merges_in_float32_and_keeps_the_dtype(tmp_path, base, adapter, lora):
    export_adapter(adapter, base, tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    a, b = lora.values()
    expected = (before[LINEAR].astype(np.float32) + 4.0 * b @ a).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(after[LINEAR], expected)
    assert after.keys() == before.keys()
    for name in before.keys() - {LINEAR}:
        assert after[name].dtype == before[name].dtype
        np.testing.assert_array_equal(after[name], before[name])


def test_export_copies_config_and_tokenizer(tmp_path, base, adapter):
    export_adapter(adapter, base, tmp_path / "merged")
    copied = {path.name for path in (tmp_path / "merged").iterdir()} - {"model.safetensors", CHECK_FILE}
    assert copied == {path.name for path in base.iterdir()} - {"model.safetensors", "optimizer.pt"}
    assert (tmp_path / "merged/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_sharded_export_equals_single_file(tmp_path, base, adapter):
    export_adapter(adapter, base, tmp_path / "one")
    export_adapter(adapter, base, tmp_path / "many", max_shard_bytes=1)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    many = {name: array for shard in shards for name, array in load_file(shard).items()}
    for name, array in load_file(tmp_path / "one/model.safetensors").items():
        np.testing.assert_array_equal(many[name], array)


def test_saved_model_is_complete_and_may_be_saved_again(tmp_path, base):
    for factor in (1.0, 2.0):
        trained = {LINEAR: jnp.arange(64.0).reshape(8, 8) / 7 * factor, EMBEDDING: jnp.ones((16, 8), jnp.bfloat16)}
        save_model(tmp_path / "model", trained, base)
        saved = load_file(tmp_path / "model/model.safetensors")
        assert {name: array.dtype for name, array in saved.items()} == {n: a.dtype for n, a in trained.items()}
        np.testing.assert_array_equal(saved[LINEAR], trained[LINEAR])
        assert (tmp_path / "model/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "model"}


def test_saved_model_takes_the_wanted_dtype(tmp_path, base):
    trained = {LINEAR: jnp.arange(64.0).reshape(8, 8) / 7}
    save_model(tmp_path / "model", trained, base, dtype=jnp.bfloat16)
    saved = load_file(tmp_path / "model/model.safetensors")
    np.testing.assert_array_equal(saved[LINEAR], np.asarray(trained[LINEAR]).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("others", "kept"), [(ml_dtypes.bfloat16, np.float32), (np.float32, ml_dtypes.bfloat16)])
def test_float32_tensors_of_a_base_in_16_bits_stay_so(tmp_path, base, others, kept):
    file = base / "model.safetensors"
    wide = {name: v if v.dtype == np.float32 else v.astype(others) for name, v in load_file(file).items()}
    save_file(wide, file)
    trained = {LINEAR: jnp.arange(64.0).reshape(8, 8) / 7, "model.norm.weight": jnp.arange(8.0) / 7}
    save_model(tmp_path / "model", trained, base, dtype=jnp.bfloat16)
    saved = load_file(tmp_path / "model/model.safetensors")
    assert saved[LINEAR].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(saved["model.norm.weight"], np.asarray(trained["model.norm.weight"]).astype(kept))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "model.layers.7.self_attn.q_proj",
            (2, 8),
            "it adapts model.layers.7.self_attn.q_proj, missing from the base",
        ),
        ("model.layers.0.self_attn.q_proj", (2, 9), r"q_proj it is \[8, 9\], the base \[8, 8\]"),
    ],
)
def test_adapter_of_another_model_is_refused(tmp_path, base, name, shape, message):
    lora = {f"{name}.lora_A": np.ones(shape, np.float32), f"{name}.lora_B": np.ones((8, 2), np.float32)}
    save_adapter(tmp_path / "other", lora, CONFIG, "other")
    with pytest.raises(ValueError, match=f"does not belong to .*{message}"):
        export_adapter(tmp_path / "other", base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_quantized_base_is_refused(tmp_path, base, adapter):
    path = base / "model.safetensors"
    save_file(load_file(path) | {LINEAR: np.ones((8, 8), np.uint8)}, path)
    with pytest.raises(ValueError, match=r"is quantized \(uint8\)"):
        export_adapter(adapter, base, tmp_path / "merged")


def test_output_folder_in_use_is_refused(tmp_path, base, adapter):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/mine.txt").touch()
    with pytest.raises(ValueError, match="merged is not empty"):
        export_adapter(adapter, base, tmp_path / "merged")


@pytest.mark.long
def test_script_reports_a_mistake_in_one_line(tmp_path, base):
    arguments = ["--adapter", str(tmp_path / "gone"), "--base", str(base), "--output", str(tmp_path / "merged")]
    script = Forked(tmp_path / "script", run_script, ROOT / "scripts/export.py", arguments)
    status, _, errors = script.wait(60)
    assert status == 1
    assert errors.strip().splitlines()[-1].endswith("adapter_config.json is missing")


def changed_base(base, tmp_path, **tensors):
    """Copy the base with other tensors."""
    folder = shutil.copytree(base, tmp_path / "changed")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): array for name, array in tensors.items()}, path)
    return folder


@pytest.fixture
def recorded(tmp_path, base, lora):
    """An adapter that records its base."""
    save_adapter(tmp_path / "recorded", lora, CONFIG, "base", identify(base))
    return tmp_path / "recorded"


@pytest.mark.parametrize("name", ["model.norm.weight", LINEAR])
def test_adapter_of_another_base_of_the_same_shape_is_refused(tmp_path, base, recorded, name):
    tensor = load_file(base / "model.safetensors")[name]
    other = changed_base(base, tmp_path, **{name.replace(".", "__"): (1.5 * tensor).astype(tensor.dtype)})
    export_adapter(recorded, base, tmp_path / "merged")
    with pytest.raises(ValueError, match=r"does not belong to .*changed: (weights|linears) \w+ was recorded"):
        export_adapter(recorded, other, tmp_path / "other")
    with pytest.raises(ValueError, match="does not belong"):
        add_adapter(load_model(other), recorded, identify(other))
    assert not (tmp_path / "other").exists()


def test_a_base_in_another_dtype_or_format_is_the_same_base(tmp_path, base, recorded):
    tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(base / "model.safetensors").items()}
    wide = changed_base(base, tmp_path, **tensors)
    assert identify(wide) == identify(base)
    quantize_folder(base, tmp_path / "int8", "int8")
    add_adapter(load_model(tmp_path / "int8"), recorded, identify(tmp_path / "int8"))


def test_adapter_of_another_family_is_refused(tmp_path, base, recorded, adapter):
    raw = RAW | {"model_type": "qwen3", "head_dim": 4, "num_key_value_heads": 2}
    (base / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="model_type llama was recorded, this base has qwen3"):
        export_adapter(recorded, base, tmp_path / "merged")
    path = adapter / "adapter_config.json"
    mapping = {"auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | mapping))
    with pytest.raises(ValueError, match="it adapts a Qwen3MoeForCausalLM, the base is of qwen3"):
        export_adapter(adapter, base, tmp_path / "merged")


def test_adapter_lacking_a_layer_is_refused(tmp_path, base, adapter):
    (base / "config.json").write_text(json.dumps(RAW | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"it lacks model\.layers\.1\.self_attn\.q_proj, which its adapter_config"):
        export_adapter(adapter, base, tmp_path / "merged")


@pytest.mark.parametrize("targets", [["nothing_here"], "", []])
def test_adapter_of_modules_that_its_config_does_not_target_is_refused(tmp_path, base, adapter, targets):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": targets}))
    with pytest.raises(ValueError, match=r"it holds model\.layers\.0\.self_attn\.q_proj.*does not target"):
        export_adapter(adapter, base, tmp_path / "merged")


def test_an_unrecorded_base_is_said(tmp_path, base, adapter, caplog):
    export_adapter(adapter, base, tmp_path / "merged")
    assert "records no base: checked by names and shapes alone" in caplog.text


def test_a_merge_that_overflows_is_refused(tmp_path, base, lora):
    lora = {name: 1e30 * tensor for name, tensor in lora.items()}
    save_adapter(tmp_path / "large", lora, CONFIG, "base")
    with pytest.raises(ValueError, match=r"q_proj\.weight is not finite"):
        export_adapter(tmp_path / "large", base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_links_out_of_the_folder_are_not_followed(tmp_path, base, adapter):
    (tmp_path / "secret").write_text("{}")
    (base / "tokenizer_extra").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"tokenizer_extra is a link to .*secret, outside its folder"):
        export_adapter(adapter, base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_merge_is_read_back_and_compared(tmp_path, base, adapter):
    check = export_adapter(adapter, base, tmp_path / "merged")
    kept = json.loads((tmp_path / "merged" / CHECK_FILE).read_text())
    assert kept["kl"] == check.kl <= check.limit
    assert kept["max_logit_difference"] > 0
    assert kept["tokens"] == 128


@pytest.mark.parametrize("change", [lambda delta: 0 * delta.b, lambda delta: -delta.b])
def test_a_merge_that_loses_the_adapter_fails(tmp_path, base, lora, change, monkeypatch):
    lora = {name: 4 * tensor for name, tensor in lora.items()}
    save_adapter(tmp_path / "strong", lora, CONFIG, "base")
    add_to = Delta.add_to
    monkeypatch.setattr(Delta, "add_to", lambda delta, weight: add_to(replace(delta, b=change(delta)), weight))
    with pytest.raises(ValueError, match="does not predict as its origin: read back: KL"):
        export_adapter(tmp_path / "strong", base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_remains_of_a_killed_export_are_removed(tmp_path, base, adapter):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    mine, alive = (f"{temporary_prefix(tmp_path / 'merged')}{pid}.abc.tmp" for pid in (int(dead.stdout), 1))
    for name in (mine, alive, ".merged.other.tmp"):
        (tmp_path / name).mkdir()
    export_adapter(adapter, base, tmp_path / "merged")
    assert not (tmp_path / mine).exists()
    assert (tmp_path / alive).exists()
    assert (tmp_path / ".merged.other.tmp").exists()


def test_a_folder_lost_between_two_renames_comes_back(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (tmp_path / f"{temporary_prefix(tmp_path / 'model')}{int(dead.stdout)}.abc.old").mkdir()
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "model", replace=True):
        raise ZeroDivisionError
    assert (tmp_path / "model").is_dir()


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.bool_])
def test_integers_are_not_loaded_as_weights(base, dtype):
    path = base / "model.safetensors"
    save_file(load_file(path) | {LINEAR: np.ones((8, 8), dtype)}, path)
    with pytest.raises(ValueError, match=rf"q_proj\.weight in .* holds {np.dtype(dtype)}, expected floating-point"):
        load_model(base)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "rows"])
def test_a_grown_vocabulary_is_merged(tmp_path, base, lora, whole):
    before = load_file(base / "model.safetensors")[EMBEDDING]
    expected = np.zeros((18, 8), before.dtype)
    expected[:16] = before
    expected[[3, 16, 17]] = np.arange(24).reshape(3, 8)
    if whole:
        trained, config = {EMBEDDING: expected}, replace(CONFIG, modules_to_save=("embed_tokens",))
    else:
        trained = {f"model.embed_tokens.{ROWS}": expected[[3, 16, 17]]}
        config = replace(CONFIG, trainable_token_indices=(3, 16, 17))
    tensors = lora | {name: np.asarray(value, np.float32) for name, value in trained.items()}
    save_adapter(tmp_path / "grown", tensors, config, "base", tied=True)
    export_adapter(tmp_path / "grown", base, tmp_path / "merged")
    after = load_file(tmp_path / "merged/model.safetensors")[EMBEDDING]
    np.testing.assert_array_equal(after, expected)
    assert json.loads((tmp_path / "merged/config.json").read_text())["vocab_size"] == 18
    assert load_model(tmp_path / "merged").embed_tokens.weight.shape == (18, 8)


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_are_compared_as_means_of_normal_distributions(sign):
    rows, origin = random_rows(8), jnp.zeros((2, 64, 1))
    check = compare(origin, origin + 2.0 * sign, rows, 0.1)
    assert check.kl == pytest.approx(2.0)
    with pytest.raises(ValueError, match="does not predict as its origin"):
        check.require("folder")
