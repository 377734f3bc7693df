"""Layers computed tile by tile give the loss and gradients of whole rows."""

import chex
import jax
import pytest
from selection import repeat

from jaxglue.models.context import RouterLosses

LENGTHS = [[5, 1, 7], [12]]
FAMILIES = {
    "qwen3": {},
    "nf4": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "quantize": "nf4"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ("sliding_attention",) * 2,  # one type compiles once
        "intermediate_size": 32,
    },
    "phi3_nf4": {
        "model_type": "phi3",
        "quantize": "nf4",
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "original_max_position_embeddings": 6,
        "rope_scaling": {"type": "su", "short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8},
    },
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4},
    },
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 20},
        **{"kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 10},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0},
        **{"n_group": 2, "topk_group": 1},
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "layer_types": ("linear_attention", "full_attention"),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "delta": {
        "model_type": "qwen3_5_text",
        "layer_types": ("linear_attention",) * 2,  # the gates of its attention are Muse Glimmer's
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "lfm2_nf4": {
        **{"model_type": "lfm2", "layer_types": ("conv", "full_attention"), "block_multiple_of": 64},
        **{"quantize": "nf4", "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    },
    "granite_4": {
        **{"model_type": "granitemoehybrid", "layer_types": ("mamba", "attention"), "shared_intermediate_size": 24},
        **{"num_local_experts": 0, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6},
    },
    "nemotron_h": {
        **{"model_type": "nemotron_h", "hybrid_override_pattern": "M-", "mamba_num_heads": 4, "mamba_head_dim": 8},
        **{"n_groups": 2, "ssm_state_size": 6},
    },
    "falcon_h1": {"model_type": "falcon_h1", "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_d_ssm": 32},
    "lfm3": {"model_type": "lfm3", "layer_types": ("conv", "sliding_attention"), "sliding_window": 4},
    "cohere2": {"model_type": "cohere2", "sliding_window": 4},
    "muse_glimmer": {"model_type": "muse_glimmer_text", "sliding_window": 4},
}


@pytest.fixture(autouse=True, scope="module")
def exact_matmuls():
    """On GPUs too: float32 matmuls round to TF32 there."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(
    ("family", "kind", "policy", "tile"),
    [
        repeat("qwen3", "lora", "offload:layer_input,attention_out,attention_lse", 4),
        ("qwen3", "full", "full", 7),
        repeat("nf4", "lora", "offload:layer_input,query,key,value", 14),
        repeat("gpt_oss", "lora", "none", 4),
        repeat("phi3_nf4", "lora", "offload:layer_input,query,key,value", 7),
        repeat("ministral3", "full", "full", 4),
        repeat("deepseek_v3", "lora", "offload:layer_input,query,key,value,attention_out", 4),
        ("delta", "lora", "offload:layer_input; save:delta_input", 4),
        repeat("qwen3_5", "lora", "offload:layer_input,output_gate; save:delta_input", 4),
        repeat("lfm2_nf4", "lora", "offload:layer_input,attention_out; save:delta_input", 7),
        repeat("granite_4", "lora", "offload:layer_input,output_gate; save:delta_input", 4),
        repeat("granite_4", "full", "1 x offload:layer_input + 1 x drop:layer_input; offload:attention_out", 7),
        repeat("nemotron_h", "lora", "offload:layer_input,attention_out", 7),
        repeat("falcon_h1", "lora", "1 x full + 1 x drop:layer_input; offload:attention_out,attention_lse", 7),
        repeat("lfm3", "lora", "offload:layer_input,attention_out", 4),
        repeat("cohere2", "full", "offload:layer_input,query,attention_out,attention_lse", 4),
        repeat("muse_glimmer", "lora", "offload:layer_input,output_gate", 7),
        repeat(
            "qwen3_5", "lora", "1 x offload:layer_input,attention_out + 1 x drop:layer_input; offload:attention_out", 7
        ),
    ],
)
def test_tiles_change_no_gradient(split_parts, random_batch, family, kind, policy, tile):
    parts = split_parts(kind, num_hidden_layers=2, **FAMILIES[family])
    losses = RouterLosses(z=0.5) if family == "gpt_oss" else None
    batches = [random_batch(LENGTHS, 14, seed=seed) for seed in range(2)]
    arguments = parts.trainable, parts.frozen, batches, 30.0
    whole = parts.executor("full", router_losses=losses).loss_and_gradients(*arguments)
    tiled = parts.executor(policy, tile=tile, router_losses=losses).loss_and_gradients(*arguments)
    chex.assert_trees_all_close(tiled, whole, rtol=1e-4, atol=1e-5)


def test_tile_divides_the_tokens(split_parts, random_batch):
    parts = split_parts("lora")
    with pytest.raises(ValueError, match="a tile of 5 tokens does not divide 2 × 14 tokens: use a divisor"):
        parts.executor("full", tile=5).loss(parts.trainable, parts.frozen, random_batch(LENGTHS, 14))
