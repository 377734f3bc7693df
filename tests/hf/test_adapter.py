import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxglue.hf import adapter_config
from jaxglue.hf.adapter import find_base, load_adapter, random_seed, save_adapter
from jaxglue.hf.adapter_tensors import join_rows
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.vocabulary import ROWS

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
    adapter = load_adapter(folder)
    loaded = adapter.tensors
    assert adapter.config == CONFIG
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_experts_may_have_a_rank_of_their_own(tmp_path):
    """PEFT doubles the rank of gate_up_proj by itself; it stores A [E·R, in] and B [out, R·E] of all experts."""
    rng, E, path = np.random.default_rng(0), 3, "model.layers.0.mlp.experts"
    shapes = {"gate_up_proj.lora_A": (E, 4, 8), "gate_up_proj.lora_B": (E, 12, 4)}
    shapes |= {"down_proj.lora_A": (E, 2, 6), "down_proj.lora_B": (E, 8, 2)}
    tensors = {f"{path}.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    config = LoraConfig(
        rank=2, targets=("down_proj", "gate_up_proj"), rank_pattern=(r".*\.gate_up_proj=4",), dropout=0.0
    )
    save_adapter(tmp_path, tensors, config, "some/base", model_type="qwen3_moe")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    A, B = (saved[f"base_model.model.{path}.base_layer.lora_{matrix}.weight"] for matrix in "AB")
    np.testing.assert_array_equal(A[4:8], tensors[f"{path}.gate_up_proj.lora_A"][1])
    np.testing.assert_array_equal(B[:, 1::E], tensors[f"{path}.gate_up_proj.lora_B"][1])
    adapter = load_adapter(tmp_path)
    assert adapter.config == config and adapter.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(adapter.tensors[name], array)


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
    np.testing.assert_array_equal(load_adapter(folder).tensors[name], 2 * tensors[name])


@pytest.mark.parametrize(
    "change",
    [
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["score"]},
        {"layers_to_transform": [0]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"a_feature_of_the_future": True},
    ],
)
def test_unsupported_feature_is_named(folder, change):
    change_config(folder, **change)
    (name,) = change
    with pytest.raises(ValueError, match=rf"adapter_config\.json: not supported: {name}="):
        load_adapter(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "has no lora_magnitude_vector, use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, which"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices names rows, which"),
        ({"modules_to_save": "lm_head"}, "modules_to_save: expected names"),
    ],
)
def test_a_feature_without_its_tensors_is_refused(folder, change, message):
    change_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        load_adapter(folder)


def test_other_methods_are_refused(folder):
    change_config(folder, peft_type="LOHA")
    with pytest.raises(ValueError, match="peft_type 'LOHA' is not supported"):
        load_adapter(folder)


def test_matrices_elsewhere_are_refused(folder):
    path = folder / "adapter_model.safetensors"
    key = "base_model.model.model.norm.lora_A.weight"
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": float("nan")}, "alpha: expected float, got nan, which is not finite"),
        ({"lora_alpha": "6"}, "alpha: expected float, got '6'"),
        ({"lora_alpha": None}, "alpha: expected float, got None"),
        ({"r": "2"}, "r: expected int >= 1, got '2'"),
        ({"r": 0}, "r: expected int >= 1, got 0"),
        ({"r": True}, "r: expected int >= 1, got True"),
        ({"lora_dropout": 1.5}, "dropout: expected float"),
        ({"use_rslora": "yes"}, "rslora: expected bool"),
        ({"target_modules": [1]}, "target_modules: expected names"),
        ({"target_modules": {"a": 1}}, "target_modules: expected names"),
        ({"target_parameters": "mlp"}, "target_parameters: expected names"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern: expected numbers by pattern"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern: expected PATTERN=NUMBER"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "alpha_pattern: expected PATTERN=NUMBER"),
    ],
)
def test_wrong_values_are_named(folder, change, message):
    change_config(folder, **change)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {message}"):
        load_adapter(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tensors_that_are_not_finite_are_neither_written_nor_read(folder, tensors, value):
    path, name = folder / "adapter_model.safetensors", "model.layers.0.mlp.down_proj.lora_B"
    saved = load_file(path)
    saved[f"base_model.model.{name}.weight"][3, 1] = value
    save_file(saved, path)
    with pytest.raises(ValueError, match=rf"{name} holds values that are not finite"):
        load_adapter(folder)
    tensors[name][3, 1] = value
    with pytest.raises(ValueError, match="not finite"):
        save_adapter(folder.parent / "new", tensors, CONFIG, "some/base")
    assert not (folder.parent / "new").exists()


def test_a_flipped_bit_is_found(folder):
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged: its tensors differ from their digest"):
        load_adapter(folder)


def test_integers_are_no_weights(folder):
    path = folder / "adapter_model.safetensors"
    save_file({name: array.astype(np.int8) for name, array in load_file(path).items()}, path)
    with pytest.raises(ValueError, match="holds int8, expected floating-point numbers"):
        load_adapter(folder)


def test_ranks_and_alphas_by_pattern_are_read_and_written(tmp_path, tensors):
    tensors = dict(tensors)
    for matrix, axis in (("lora_A", 0), ("lora_B", 1)):
        name = f"model.layers.0.mlp.down_proj.{matrix}"
        tensors[name] = np.concatenate([tensors[name]] * 2, axis=axis)
    config = LoraConfig(
        rank=2, alpha=6.0, targets=("down_proj", "q_proj"), rank_pattern=("mlp.down_proj=4",), alpha_pattern=("q.*=3",)
    )
    save_adapter(tmp_path / "adapter", tensors, config, "some/base")
    raw = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (raw["rank_pattern"], raw["alpha_pattern"]) == ({"mlp.down_proj": 4}, {"q.*": 3})
    read = load_adapter(tmp_path / "adapter").config
    down, q = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    assert (read.rank_of(down), read.scale_of(down)) == (4, 1.5)
    assert (read.rank_of(q), read.scale_of(q)) == (2, 1.5)


def test_a_regular_expression_as_targets_is_read_as_paths(folder):
    change_config(folder, target_modules=r"model\.layers\.0\..*(q|down)_proj")
    paths = ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj")
    assert load_adapter(folder).config.targets == paths


def test_patterns_that_take_forever_are_refused(monkeypatch):
    monkeypatch.setattr(adapter_config, "SECONDS", 0.05)
    message = r"^folder: the patterns of its adapter_config.json take more than"
    with pytest.raises(ValueError, match=message), adapter_config.matching(Path("folder")):
        re.match("(.*)*(.*)*(.*)*(.*)*x", "model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("whole", [True, False], ids=["onto a whole matrix", "alone"])
def test_rows_of_tokens_are_put_in_their_places(whole, tmp_path):
    rows, order = np.arange(6, dtype=np.float32).reshape(3, 2), [5, 0, 3]
    tensors = {f"model.embed_tokens.{ROWS}": rows} | ({"model.embed_tokens.weight": -np.ones((7, 2))} if whole else {})
    joined = join_rows(tmp_path, tensors, {"embed_tokens": order})
    if whole:
        expected = -np.ones((7, 2))
        expected[5], expected[0], expected[3] = rows
        assert joined.keys() == {"model.embed_tokens.weight"}
        np.testing.assert_array_equal(joined["model.embed_tokens.weight"], expected)
        assert (tensors["model.embed_tokens.weight"] == -1).all()
    else:
        np.testing.assert_array_equal(joined[f"model.embed_tokens.{ROWS}"], rows[[1, 2, 0]])


def test_a_moved_run_brings_its_base(tmp_path):
    (tmp_path / "run" / "base").mkdir(parents=True)
    (tmp_path / "run" / "base" / "config.json").write_text("{}")
    (tmp_path / "run" / "adapter").mkdir()
    named = {"base_model_name_or_path": "/gone/run/base"}
    (tmp_path / "run" / "adapter" / "adapter_config.json").write_text(json.dumps(named))
    assert find_base(tmp_path / "run" / "adapter") == tmp_path / "run" / "base"
    (tmp_path / "run" / "base" / "config.json").unlink()
    with pytest.raises(ValueError, match="names /gone/run/base base, which is not a folder here"):
        find_base(tmp_path / "run" / "adapter")


def test_zero_is_no_absent_option(tmp_path):
    with pytest.raises(ValueError, match="not supported: layers_to_transform=0"):
        adapter_config.refuse_unsupported(
            tmp_path, {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "layers_to_transform": 0}
        )


@pytest.mark.parametrize(("weights", "seed"), [("random 5 0a1b", 5), ("0a1b2c", None)])
def test_the_seed_of_a_random_base_is_recorded(tmp_path, tensors, weights, seed):
    save_adapter(tmp_path, tensors, CONFIG, "some/base", {"model_type": "qwen3", "weights": weights})
    assert random_seed(tmp_path) == seed


def test_linear_layers_named_as_matrices_of_experts_are_targeted_as_parameters(tmp_path):
    """PEFT 0.21 takes a target `gate_proj` of types with experts for all experts, and adapts no linear layer."""
    paths = ("0.self_attn.o_proj", "0.mlp.gate_proj", "1.mlp.shared_experts.gate_proj")
    tensors = {f"model.layers.{path}.lora_A": np.ones((3 if "gate" in path else 2, 8), np.float32) for path in paths}
    tensors |= {name.replace("_A", "_B"): array.T for name, array in tensors.items()}
    config = LoraConfig(rank=2, targets=("o_proj", "gate_proj"), rank_pattern=("gate_proj=3",))
    save_adapter(tmp_path, tensors, config, "", model_type="deepseek_v3")
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["target_modules"] == ["o_proj"]
    assert raw["target_parameters"] == ["mlp.gate_proj.weight", "mlp.shared_experts.gate_proj.weight"]
    assert raw["rank_pattern"] == {"gate_proj": 3, "gate_proj.weight": 3}
    adapter = load_adapter(tmp_path)
    assert set(adapter.config.targets) == {"o_proj", "gate_proj"} and adapter.config.rank_pattern == ("gate_proj=3",)
    assert adapter.tensors.keys() == tensors.keys()
