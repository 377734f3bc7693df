"""Make the goldens of model families: config.json, logits, loss, and norms and probes of all gradients.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24, in float32 on a CPU):

    python tests/goldens/make_families.py [TYPE …]

Weights are those of `drawn.py`. Each file `families/<name>.safetensors` has as metadata the config that transformers
saves, and the tensors of `make_models.py`; `parts/` has those of families that tests bring along.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from drawn import drawn
from make_models import SHAPE, YARN_ROPE, documents, golden, probed
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

EAGER = {"attn_implementation": "eager"}
HERE = Path(__file__).parent / "families"
KINDS = ["sliding_attention", "full_attention"]
SLIDING = {"sliding_window": 4, "layer_types": KINDS}
FULL_YARN = {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.3],
    "long_factor": [1.0, 3.0],
}
RENAMED = (
    *((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm.")),
    *((".gate.moe_statics.", ".gate."), (".mlp.e_score", ".mlp.gate.e_score")),
    *((".q_layernorm.", ".q_norm."), (".k_layernorm.", ".k_norm."), ("model.embedding_norm.", "model.norm.")),
    *(("model.embeddings.", "model.embed_tokens."), ("model.norm_f.", "model.norm.")),
    ("model.final_layernorm.", "model.norm."),
    *((".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"),),
)
"""Parts of parameters' names, and ours, which `Spelling`s give them in files."""
KDA = "kimi_linear", "bailing_hybrid"
OF_TYPES = {
    "olmo_hybrid": (
        ("layers.0.input_layernorm.", "layers.0.attention_layer_norm."),
        ("layers.0.post_attention_layernorm.", "layers.0.feedforward_layer_norm."),
    )
}
"""Likewise of some types: OLMo Hybrid's first layer has linear attention here."""
JOINED = {"olmo_hybrid": "linear_attn.conv1d.weight", **dict.fromkeys(KDA, "self_attn.conv1d.weight")}
"""Parameters that are three here, of queries, keys and values."""
STORED = ("layer_scalar", "e_score_correction_bias", "expert_bias")
"""Buffers that are drawn."""
OTHER_TYPES = {"phi3_longrope": "phi3", "gemma4_text_joined": "gemma4_text", "gemma4_text_experts": "gemma4_text"}
OTHER_TYPES |= {
    "olmo_hybrid_nope": "olmo_hybrid",
    "granitemoehybrid_dense": "granitemoehybrid",
    "falcon_h1_plain": "falcon_h1",
}
"""Types of goldens that are named otherwise."""
LATENT = {
    **{"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "num_key_value_heads": 4},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.0}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 4}
GRANITE = {"attention_multiplier": 0.4, "embedding_multiplier": 6.0, "residual_multiplier": 0.7, "logits_scaling": 3.0}
MODELS = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 4},
    "mistral": {"sliding_window": 4},
    "granite": {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {**SLIDING, "rope_parameters": FULL_YARN},
    "smollm3": {**SLIDING, "use_sliding_window": True, "no_rope_layers": [0, 1], "rope_theta": 100.0},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 12, "rope_parameters": FULL_YARN},
    "glm4": {"rope_theta": 100.0},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 4, "head_dim": 8},
    "phi3_longrope": {"head_dim": 4, "original_max_position_embeddings": 6, "rope_parameters": LONGROPE},
    "gemma4_text": {
        **{"sliding_window": 4, "num_hidden_layers": 4, "global_head_dim": 16},
        "rope_parameters": GEMMA4_ROPES,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 24},
    },
    "gemma4_text_joined": {
        **SLIDING,
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0, "rope_parameters": GEMMA4_ROPES},
    },
    "gemma4_text_experts": {
        **SLIDING,
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"hidden_size_per_layer_input": 0, "rope_parameters": GEMMA4_ROPES},
        **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 12},
    },
    "mixtral": {"num_local_experts": 6, "sliding_window": 4, "rope_theta": 100.0},
    "qwen2_moe": {
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"shared_expert_intermediate_size": 24, "mlp_only_layers": [1], "num_hidden_layers": 3},
        **{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    },
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 12},
        **{"n_shared_experts": 2, "routed_scaling_factor": 1.7, "attention_bias": True, "use_qk_norm": True},
        **{"rope_theta": 100.0},
    },
    "deepseek_v2": {
        **LATENT,
        **{"q_lora_rank": None, "v_head_dim": 6, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        **{"routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "rope_parameters": {**YARN_ROPE, **MSCALES}},
    },
    "deepseek_v3": {
        **LATENT,
        **{"q_lora_rank": 10, "v_head_dim": 6, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        **{"attention_bias": True, "rope_parameters": {**YARN_ROPE, **MSCALES}},
    },
    "glm4_moe_lite": {**LATENT, "q_lora_rank": 10, "v_head_dim": 12, "rope_theta": 100.0},
    "qwen3_5_moe_text": {
        **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 4,
        },
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"shared_expert_intermediate_size": 24},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "seed_oss": {"attention_out_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "exaone4": SLIDING,
    "hunyuan_v1_dense": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 7.0, "factor": 1.0, "rope_theta": 100.0},
    },
    "ernie4_5": {"use_bias": True, "rope_theta": 100.0, "tie_word_embeddings": False},
    "ernie4_5_moe": {
        **{"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 12, "moe_num_shared_experts": 2},
        **{"rope_theta": 100.0, "tie_word_embeddings": False},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 4, "rope_theta": 100.0, "conv_bias": True},
    "lfm2_moe": {
        **{"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "routed_scaling_factor": 1.5},
        **{"rope_theta": 100.0, "conv_L_cache": 4},
    },
    "lfm3": {
        **{"layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3},
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
        **{"sliding_window": 4, "conv_bias": True},
    },
    "qwen3_next": {
        **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "cohere": {"head_dim": 4, "logit_scale": 0.4, "rope_theta": 100.0},
    "cohere2": {**SLIDING, "head_dim": 4, "logit_scale": 0.4, "rope_theta": 100.0},
    "gemma4_unified_text": {
        **SLIDING,
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        "rope_parameters": GEMMA4_ROPES,
    },
    "muse_glimmer_text": {
        **{"layer_types": KINDS, "layer_rope_theta": [100.0, 0], "rope_theta": 100.0, "sliding_window": 4},
        **{"output_multiplier": 0.4, "final_logit_softcapping": 2.0, "post_norm_eps": 1e-2},
    },
    "minimax_m2": {
        **{"num_local_experts": 6, "num_experts_per_tok": 3},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "granitemoehybrid": {
        **MAMBA,
        **GRANITE,
        **{"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 20},
        **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12, "time_step_limit": [0.2, 1.5]},
    },
    "granitemoehybrid_dense": {
        **MAMBA,
        **GRANITE,
        **{"layer_types": ["full_attention", "linear_attention"], "shared_intermediate_size": 20},
        **{"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": "ME*-", "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2},
        **{"ssm_state_size": 6, "chunk_size": 4, "time_step_min": 1e-30, "mlp_bias": True, "use_bias": True},
        **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 3},
        **{"topk_group": 2, "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 12},
        **{"routed_scaling_factor": 1.7, "num_hidden_layers": None},
    },
    "falcon_h1": {
        **MAMBA,
        **{"mamba_d_ssm": 32, "mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True, "rope_theta": 100.0},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "ssm_in_multiplier": 1.3},
        **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_out_multiplier": 0.6},
        **{"mlp_multipliers": [0.9, 0.5], "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7]},
    },
    "falcon_h1_plain": {
        **MAMBA,
        **{"mamba_d_ssm": 32, "key_multiplier": 0.7, "attention_bias": True, "mamba_proj_bias": True},
        **{"mamba_conv_bias": False},
    },
    "olmo_hybrid": {
        **{"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2, "attention_bias": True},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    },
    "olmo_hybrid_nope": {
        **{"layer_types": ["linear_attention", "full_attention"], "linear_allow_neg_eigval": False},
        **{"linear_key_head_dim": 4, "rope_parameters": None},
    },
    "kimi_linear": {
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
        **{"linear_num_heads": 2, "linear_head_dim": 6, "kv_lora_rank": 12, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4, "num_key_value_heads": 4, "num_experts": 8},
        **{"num_experts_per_token": 3, "num_shared_experts": 2, "moe_intermediate_size": 12},
        **{"num_expert_group": 4, "topk_group": 2},
    },
    "bailing_hybrid": {
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
        **{"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 6},
        **{"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 12},
        **{"num_expert_group": 4, "topk_group": 2, "rope_theta": 100.0, "first_k_dense_replace": 1, "q_lora_rank": 10},
    },
    "ministral3": {
        "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.3}
    },
}


class Muse(torch.nn.Module):
    """Muse Glimmer's text model with the output projection of the model around it, which needs images."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.model, self.config = AutoModel.from_config(config, **EAGER), config
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        """Return scaled and capped logits, as `MuseGlimmerForConditionalGeneration`."""
        logits = self.lm_head(self.model(tokens).last_hidden_state) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return SimpleNamespace(logits=cap * torch.tanh(logits / cap))


def build(name: str, fields: dict) -> tuple[PreTrainedConfig, torch.nn.Module]:
    """Return a config and its model with drawn weights."""
    config = AutoConfig.for_model(OTHER_TYPES.get(name, name), **SHAPE | {"pad_token_id": None} | fields)
    made = Muse(config) if name == "muse_glimmer_text" else AutoModelForCausalLM.from_config(config, **EAGER)
    model = made.float().eval()
    with torch.no_grad():
        stored = [item for item in model.named_buffers() if item[0].endswith(STORED)]
        for parameter_name, parameter in [*model.named_parameters(), *stored]:
            for own_name, part in ours(parameter_name, parameter, config):
                part.copy_(torch.from_numpy(drawn(own_name, tuple(part.shape))))
    return config, model


def our_name(name: str, model_type: str = "") -> str:
    """Return a parameter's name here."""
    for theirs, own in (*RENAMED, *OF_TYPES.get(model_type, ())):
        name = name.replace(theirs, own)
    return name


def ours(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> list[tuple[str, torch.Tensor]]:
    """Return the names here of a tensor's parts, and these."""
    joined, name = JOINED.get(config.model_type), our_name(name, config.model_type)
    if joined is None or not name.endswith(joined):
        return [(name, tensor)]
    of_values = (
        len(tensor) // 3 if config.model_type in KDA else config.linear_num_value_heads * config.linear_value_head_dim
    )
    keys = (len(tensor) - of_values) // 2
    parts = tensor.split([keys, keys, of_values])
    return [(name.replace("conv1d", f"{letter}_conv1d"), part) for letter, part in zip("qkv", parts, strict=True)]


def make(name: str, fields: dict) -> None:
    """Write one family's golden."""
    config, model = build(name, fields)
    folder = HERE.parent / "parts" if name == "cohere" else HERE
    folder.mkdir(exist_ok=True)
    saved = json.dumps(config.to_dict() | {"architectures": [type(model).__name__]})
    tensors = golden(model, documents(0))
    tensors = {own_name: part for key, tensor in tensors.items() for own_name, part in ours(key, tensor, config)}
    save_file(probed(tensors), folder / f"{name}.safetensors", metadata={"config": saved})


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        make(name, MODELS[name])
