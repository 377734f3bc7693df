import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.export import export_adapter, save_model
from jaxglue.models.lora import LoraConfig

ROOT = Path(__file__).parents[2]
CONFIG = LoraConfig(rank=2, alpha=8.0, targets=("q_proj",))
LINEAR = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def base(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {
        EMBEDDING: rng.normal(size=(16, 8)).astype(ml_dtypes.bfloat16),
        LINEAR: rng.normal(size=(12, 8)).astype(ml_dtypes.bfloat16),
        "model.norm.weight": np.ones(8, np.float32),
    }
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"tie_word_embeddings": True, "file": name}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"not a part of the model")
    return folder


@pytest.fixture
def lora():
    rng = np.random.default_rng(1)
    return {
        "model.layers.0.self_attn.q_proj.lora_A": rng.normal(size=(2, 8)).astype(np.float32),
        "model.layers.0.self_attn.q_proj.lora_B": rng.normal(size=(12, 2)).astype(np.float32),
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
    copied = {path.name for path in (tmp_path / "merged").iterdir()} - {"model.safetensors"}
    assert copied == {path.name for path in base.iterdir()} - {"model.safetensors", "optimizer.pt"}
    assert (tmp_path / "merged/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_sharded_export_equals_single_file(tmp_path, base, adapter):
    export_adapter(adapter, base, tmp_path / "one")
    export_adapter(adapter, base, tmp_path / "many", max_shard_bytes=1)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) == 3
    many = {name: array for shard in shards for name, array in load_file(shard).items()}
    for name, array in load_file(tmp_path / "one/model.safetensors").items():
        np.testing.assert_array_equal(many[name], array)


def test_saved_model_is_complete_and_may_be_saved_again(tmp_path, base):
    for factor in (1.0, 2.0):
        trained = {LINEAR: jnp.arange(96.0).reshape(12, 8) / 7 * factor, EMBEDDING: jnp.ones((16, 8), jnp.bfloat16)}
        save_model(tmp_path / "model", trained, base)
        saved = load_file(tmp_path / "model/model.safetensors")
        assert {name: array.dtype for name, array in saved.items()} == {n: a.dtype for n, a in trained.items()}
        np.testing.assert_array_equal(saved[LINEAR], trained[LINEAR])
        assert (tmp_path / "model/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "model"}


def test_saved_model_takes_the_wanted_dtype(tmp_path, base):
    trained = {LINEAR: jnp.arange(96.0).reshape(12, 8) / 7}
    save_model(tmp_path / "model", trained, base, dtype=jnp.bfloat16)
    saved = load_file(tmp_path / "model/model.safetensors")
    np.testing.assert_array_equal(saved[LINEAR], np.asarray(trained[LINEAR]).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "model.layers.7.self_attn.q_proj",
            (2, 8),
            "it adapts model.layers.7.self_attn.q_proj.weight, missing from the base",
        ),
        ("model.layers.0.self_attn.q_proj", (2, 9), r"q_proj.weight it is \[12, 9\], the base \[12, 8\]"),
    ],
)
def test_adapter_of_another_model_is_refused(tmp_path, base, name, shape, message):
    lora = {f"{name}.lora_A": np.ones(shape, np.float32), f"{name}.lora_B": np.ones((12, 2), np.float32)}
    save_adapter(tmp_path / "other", lora, CONFIG, "other")
    with pytest.raises(ValueError, match=f"does not belong to .*{message}"):
        export_adapter(tmp_path / "other", base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_quantized_base_is_refused(tmp_path, base, adapter):
    path = base / "model.safetensors"
    save_file(load_file(path) | {LINEAR: np.ones((12, 8), np.uint8)}, path)
    with pytest.raises(ValueError, match=r"is quantized \(uint8\)"):
        export_adapter(adapter, base, tmp_path / "merged")


def test_output_folder_in_use_is_refused(tmp_path, base, adapter):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/mine.txt").touch()
    with pytest.raises(ValueError, match="merged is not empty"):
        export_adapter(adapter, base, tmp_path / "merged")


@pytest.mark.slow
def test_script_reports_a_mistake_in_one_line(tmp_path, base):
    command = [sys.executable, str(ROOT / "scripts/export.py"), "--adapter", str(tmp_path / "gone")]
    command += ["--base", str(base), "--output", str(tmp_path / "merged")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].endswith("adapter_config.json is missing")
