"""Runs of models with Mamba-2, and of relatives of the gated delta rule.

Adapters of all projections, quantized bases, pairs, tiles, weights of all, answers.
"""

import json

import numpy as np
import pytest
from selection import thorough

from jaxglue.hf.adapter import load_adapter
from jaxglue.training.record import read_metrics
from jaxglue.training.train import train

MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16}
TYPES = {
    "granitemoehybrid": {
        **{**MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    },
    "nemotron_h": {
        **{
            "hybrid_override_pattern": "ME*-",
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "intermediate_size": 64,
        },
        **{"ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "moe_intermediate_size": 64},
        **{"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 64, "hidden_act": None},
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "intermediate_size": 64, "mlp_multipliers": [0.9, 0.5]},
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
KDA = {
    **HYBRID,
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "kv_lora_rank": 64, "v_head_dim": 32},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "num_expert_group": 1, "topk_group": 1, "linear_head_dim": 64},
    **{"num_key_value_heads": None, "linear_num_heads": 2, "first_k_dense_replace": 1, "intermediate_size": 64},
}
DELTA_TYPES = {
    "olmo_hybrid": {
        **HYBRID,
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "intermediate_size": 64},
    },
    "kimi_linear": KDA,
    "bailing_hybrid": KDA,
}
ALL_TYPES = TYPES | DELTA_TYPES
ADAPTED = {
    "granitemoehybrid": {"0.mamba.in_proj", "0.mamba.out_proj", "0.block_sparse_moe.experts.down_proj"},
    "nemotron_h": {"0.mixer.in_proj", "0.mixer.out_proj", "1.mixer.experts.up_proj", "1.mixer.fc1_latent_proj"},
    "falcon_h1": {"0.mamba.in_proj", "0.mamba.out_proj", "0.self_attn.q_proj", "1.feed_forward.gate_proj"},
}


@pytest.fixture
def set_type(model_folder):
    """Make the model folder one of a type."""

    def change(model_type):
        path = model_folder / "config.json"
        sizes = {"model_type": model_type, "hidden_size": 64, "head_dim": 32}  # which NF4's blocks divide
        path.write_text(json.dumps(json.loads(path.read_text()) | sizes | ALL_TYPES[model_type]))

    return change


@pytest.mark.parametrize("model_type", TYPES)
@thorough("models/test_mamba.py")
def test_adapters_of_all_projections_learn_and_answer(model_type, set_type, make_config, tmp_path, caplog):
    set_type(model_type)
    config = make_config(targets=("all-linear",), steps=6, sample_prompt=("Hello",), sample_tokens=3)
    summary = train(config)
    assert summary.last_loss < summary.first_loss - 0.1
    tensors = load_adapter(tmp_path / "run/adapter").tensors
    modules = {name.partition(".lora_")[0].removeprefix("model.layers.") for name in tensors}
    assert modules >= ADAPTED[model_type]
    assert all(np.any(tensor) for tensor in tensors.values())
    assert any("adapts Mamba-2's out_proj" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("settings", [{"quantize": "nf4"}, {"matmul": "fp8"}, {"tile": 48}, {"remat": "full"}], ids=str)
@pytest.mark.parametrize("model_type", ALL_TYPES)
@thorough("models/test_mamba.py")
def test_other_ways_to_train_learn_too(model_type, settings, set_type, make_config):
    set_type(model_type)
    if settings == {"tile": 48} and model_type == "falcon_h1":
        pytest.skip("its layers pass whole")
    summary = train(make_config(targets=("all-linear",), steps=6, **settings))
    assert summary.last_loss < summary.first_loss - 0.05


@pytest.mark.parametrize("model_type", ALL_TYPES)
@thorough("models/test_mamba.py")
def test_all_weights_learn(model_type, set_type, make_config):
    set_type(model_type)
    summary = train(make_config(method="full", steps=6))
    assert summary.last_loss < summary.first_loss - 0.1


@pytest.mark.parametrize("model_type", ALL_TYPES)
@thorough("models/test_mamba.py")
def test_pairs_share_their_prompt(model_type, set_type, make_config, write_jsonl, monkeypatch, tmp_path):
    set_type(model_type)
    pair = {"prompt": "What is 1 and 2? ", "chosen": "It is 3.", "rejected": "Good"}
    pairs = {"objective": "dpo", "data": (write_jsonl([pair] * 3, "pairs.jsonl"),), "seq_len": 192}
    shared = train(make_config(**pairs, steps=3, output=tmp_path / "shared"))
    monkeypatch.setattr("jaxglue.training.row_source.why_prompts_are_copied", lambda *_: "copies")
    copied = train(make_config(**pairs, steps=3, output=tmp_path / "copied"))
    assert shared.first_loss == pytest.approx(np.log(2), abs=1e-5)
    assert shared.last_loss == pytest.approx(copied.last_loss, rel=1e-4)


@pytest.mark.parametrize("model_type", ALL_TYPES)
@thorough("models/test_mamba.py")
def test_answers_are_rewarded_as_training_scores_them(model_type, set_type, make_config, write_jsonl, tmp_path):
    """Sampling follows states in slots, training those of packed rows behind copies of prompts."""
    set_type(model_type)
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def remainder(completion_ids):\n    return float(sum(completion_ids) % 97)\n")
    rows = [{"question": f"What is {number}?"} for number in range(4)]
    rollouts = {
        "objective": "grpo",
        "reward": (f"{rewards}:remainder",),
        "num_generations": 4,
        "generation_batch_size": 8,
    }
    rollouts |= {"data": (write_jsonl(rows, "prompts.jsonl"),), "seq_len": 128, "max_completion_length": 8}
    summary = train(make_config(targets=("all-linear",), steps=3, **rollouts))
    steps = [values for values in read_metrics(summary.metrics) if "loss" in values]  # experts' loads have lines, too
    assert len(steps) == 3
    assert all(values["sampling/sampling_logp_difference/mean"] < 1e-5 for values in steps)
