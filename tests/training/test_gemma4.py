"""Runs of Gemma 4's text model, whose layers share keys and values and have embeddings of their own."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from selection import repeats_parts_of, thorough

from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.merge import export_adapter
from jaxglue.training.setup import resolve
from jaxglue.training.train import train

GEMMA4 = {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "num_kv_shared_layers": 1,
    "layer_types": ["full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 400,
}


@pytest.fixture
def gemma4_folder(model_folder):
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | GEMMA4))
    return model_folder


@thorough("training/test_sft_trainer.py")
def test_adapters_learn_in_layers_that_share_keys_and_values(make_config, gemma4_folder, tmp_path):
    summary = train(make_config(targets=("all-linear",), steps=4))
    assert summary.last_loss < summary.first_loss - 0.1
    adapter = load_adapter(tmp_path / "run/adapter")
    kinds = {name.split(".", 3)[3].partition(".lora_")[0] for name in adapter.tensors if ".layers.1." in name}
    assert kinds >= {"self_attn.q_proj", "per_layer_input_gate", "per_layer_projection"}
    assert "self_attn.k_proj" not in kinds
    export_adapter(tmp_path / "run/adapter", tmp_path / "run/base", tmp_path / "merged")
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", tmp_path / "run/base"))
    assert merged.keys() == base.keys() and "model.layers.1.layer_scalar" in merged
    name = "model.embed_tokens_per_layer.weight"
    np.testing.assert_array_equal(merged[name], base[name])


@repeats_parts_of("test_table_of_embeddings_for_each_layer_gives_the_same_step_and_is_left_out_of_the_plan")
def test_embeddings_of_layers_on_the_host_train_alike(make_config, gemma4_folder, tmp_path):
    losses = []
    for place in ("device", "host"):
        summary = train(make_config(steps=2, embeddings=place, output=str(tmp_path / place)))
        losses.append((summary.first_loss, summary.last_loss))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("changes", [{"method": "full"}, {"modules_to_save": ("embed_tokens",)}])
def test_training_that_embeddings_of_layers_depend_on_is_refused(make_config, gemma4_folder, changes):
    with pytest.raises(
        ValueError, match="has embeddings for each layer, which are frozen, so the tokens' must be, too"
    ):
        resolve(make_config(steps=1, **changes))


ALIKE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}  # layers of one type compile once
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}


@repeats_parts_of("test_full_fine_tuning_writes_a_model_folder")
def test_full_fine_tuning_trains_experts_and_routers_and_keeps_the_scalars_of_layers(
    make_config, gemma4_folder, tmp_path
):
    path = gemma4_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | EXPERTS | ALIKE))
    train(make_config(method="full", steps=1))
    stored = load_file(tmp_path / "run/model/model.safetensors")
    np.testing.assert_array_equal(stored["model.layers.1.layer_scalar"], 1)
    assert stored["model.layers.1.experts.gate_up_proj"].shape == (4, 32, 32)
    for name in ("scale", "per_expert_scale"):
        assert (stored[f"model.layers.1.router.{name}"] != 1).any()
