"""Runs of a model with linear attention."""

import json

import numpy as np
import pytest
from selection import repeats_parts_of

from jaxglue.hf.adapter import load_adapter
from jaxglue.models import config_from_hf
from jaxglue.training.checks import why_prompts_are_copied
from jaxglue.training.train import train

HYBRID = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.fixture
def hybrid_folder(model_folder):
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HYBRID))
    return model_folder


@repeats_parts_of("test_run_learns_and_writes_its_results")
def test_run_learns_answers_samples_and_saves_adapters_of_both_kinds_of_layers(make_config, hybrid_folder, tmp_path):
    config = make_config(targets=("all-linear",), steps=6, sample_prompt=("Hello",), sample_tokens=3)
    summary = train(config)
    assert summary.last_loss < summary.first_loss - 0.1
    tensors = load_adapter(tmp_path / "run/adapter").tensors
    linear = {f"0.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")}
    attention = {f"1.self_attn.{name}_proj" for name in "qkvo"}
    mlps = {f"{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down")}
    modules = {name.partition(".lora_")[0].removeprefix("model.layers.") for name in tensors}
    assert modules == linear | attention | mlps
    assert all(np.any(tensor) for tensor in tensors.values())
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(0, "Hello"), (6, "Hello")]
    model = config_from_hf(json.loads((hybrid_folder / "config.json").read_text()))
    assert not why_prompts_are_copied(config, model)


@repeats_parts_of("test_run_learns_and_writes_its_results")
def test_run_with_short_convolutions_learns_and_answers(make_config, model_folder, tmp_path):
    path = model_folder / "config.json"
    lfm = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
    path.write_text(json.dumps(json.loads(path.read_text()) | lfm))
    summary = train(make_config(targets=("all-linear",), steps=6, sample_prompt=("Hello",), sample_tokens=3))
    assert summary.last_loss < summary.first_loss - 0.1
    names = load_adapter(tmp_path / "run/adapter").tensors
    modules = {name.partition(".lora_")[0].removeprefix("model.layers.") for name in names}
    feed_forwards = {f"{layer}.feed_forward.{name}" for layer in (0, 1) for name in ("w1", "w2", "w3")}
    attention = {f"1.self_attn.{name}_proj" for name in ("q", "k", "v", "out")}
    assert modules == {"0.conv.in_proj", "0.conv.out_proj"} | attention | feed_forwards


@repeats_parts_of("test_run_learns_and_writes_its_results")
def test_experts_of_hybrids_learn(make_config, hybrid_folder, tmp_path):
    path = hybrid_folder / "config.json"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    raw = {**json.loads(path.read_text()), **experts, "shared_expert_intermediate_size": 16}
    path.write_text(json.dumps({**raw, "model_type": "qwen3_5_moe_text"}))
    summary = train(make_config(targets=("all-linear",), steps=6))
    assert summary.last_loss < summary.first_loss - 0.1
    tensors = load_adapter(tmp_path / "run/adapter").tensors
    modules = {name.partition(".lora_")[0].partition(".0.mlp.")[2] for name in tensors if ".0.mlp." in name}
    shared = {"shared_expert_gate", *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down"))}
    assert modules == shared | {"experts.gate_up_proj", "experts.down_proj"}


@repeats_parts_of("test_continuations_equal_documents_of_their_own_and_gradients_add_up")
def test_pairs_share_their_prompt(make_config, hybrid_folder, write_jsonl, monkeypatch, tmp_path):
    """One batch of three pairs, whose steps are those of pairs with a copy of the prompt for each answer."""
    pair = {"prompt": "What is 1 and 2? ", "chosen": "It is 3.", "rejected": "Good"}
    pairs = {"objective": "dpo", "data": (write_jsonl([pair] * 3, "pairs.jsonl"),), "seq_len": 192}
    shared = train(make_config(**pairs, steps=3, output=tmp_path / "shared"))
    monkeypatch.setattr("jaxglue.training.row_source.why_prompts_are_copied", lambda *_: "copies")
    copied = train(make_config(**pairs, steps=3, output=tmp_path / "copied"))
    assert shared.first_loss == pytest.approx(np.log(2), abs=1e-5)
    assert shared.last_loss < shared.first_loss - 1e-3
    assert shared.last_loss == pytest.approx(copied.last_loss, rel=1e-4)
