import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.models.lora import LoraConfig

CONFIG = LoraConfig(rank=2, alpha=6.0, dropout=0.1, rslora=True, targets=("down_proj", "q_proj"))


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    shapes = {
        "model.layers.0.self_attn.q_proj.lora_A": (2, 8),
        "model.layers.0.self_attn.q_proj.lora_B": (12, 2),
        "model.layers.0.mlp.down_proj.lora_A": (2, 16),
        "model.layers.0.mlp.down_proj.lora_B": (8, 2),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path, tensors):
    save_adapter(tmp_path / "adapter", tensors, CONFIG, "some/base")
    return tmp_path / "adapter"


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip(folder, tensors):
    config, loaded = load_adapter(folder)
    assert config == CONFIG
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_written_in_peft_convention(folder, tensors):
    saved = load_file(folder / "adapter_model.safetensors")
    np.testing.assert_array_equal(
        saved["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"],
        tensors["model.layers.0.self_attn.q_proj.lora_A"],
    )
    raw = json.loads((folder / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "r": 2,
        "lora_alpha": 6,
        "lora_dropout": 0.1,
        "use_rslora": True,
        "target_modules": ["down_proj", "q_proj"],
    }
    assert expected.items() <= raw.items()


def test_saving_again_replaces_and_leaves_nothing_else(folder, tensors):
    save_adapter(folder, {name: 2 * array for name, array in tensors.items()}, CONFIG, "some/base")
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    name = "model.layers.0.mlp.down_proj.lora_B"
    np.testing.assert_array_equal(load_adapter(folder)[1][name], 2 * tensors[name])


@pytest.mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"layers_to_transform": [0]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [1]},
        {"a_feature_of_the_future": True},
    ],
)
def test_unsupported_feature_is_named(folder, change):
    change_config(folder, **change)
    (name,) = change
    with pytest.raises(ValueError, match=rf"adapter_config\.json: not supported: {name}="):
        load_adapter(folder)


def test_other_methods_are_refused(folder):
    change_config(folder, peft_type="LOHA")
    with pytest.raises(ValueError, match="peft_type 'LOHA' is not supported"):
        load_adapter(folder)


def test_matrices_elsewhere_are_refused(folder):
    path = folder / "adapter_model.safetensors"
    key = "base_model.model.lm_head.lora_A.weight"
    save_file(load_file(path) | {key: np.ones((2, 8), np.float32)}, path)
    with pytest.raises(ValueError, match=f"{key} is not the LoRA matrix"):
        load_adapter(folder)


def test_half_a_pair_and_wrong_rank_are_refused(folder, tensors):
    change_config(folder, r=4)
    with pytest.raises(ValueError, match=r"down_proj has lora_A \[2, 16\] and lora_B \[8, 2\], expected \[4, in\]"):
        load_adapter(folder)
    del tensors["model.layers.0.self_attn.q_proj.lora_B"]
    save_adapter(folder, tensors, CONFIG, "some/base")
    with pytest.raises(ValueError, match="q_proj has only one of lora_A and lora_B"):
        load_adapter(folder)


def test_truncated_adapter_is_named(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is truncated or corrupt"):
        load_adapter(folder)


def test_folder_without_an_adapter_is_refused(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin, a pickle.*safe_serialization"):
        load_adapter(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"not a PEFT adapter folder: adapter_config\.json is missing"):
        load_adapter(folder)
