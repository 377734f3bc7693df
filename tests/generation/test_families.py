"""Greedy answers of families whose parts write caches and states in ways of their own, beside whole forward passes."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.models.parameters import split_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 8},
    "hunyuan_v1_dense": {},
    "muse_glimmer_text": {"sliding_window": 8},
    "cohere2": {"sliding_window": 8, "head_dim": None},
    "exaone4": {"sliding_window": 8},
    "qwen3_next": {
        **{**EXPERTS, "shared_expert_intermediate_size": 16, "full_attention_interval": 2},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
}
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16}
FAMILIES |= {
    "granitemoehybrid": {
        **{**MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": "MEM*-", "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 16},
        **{"ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "moe_intermediate_size": 16},
        **{"moe_shared_expert_intermediate_size": 24, "moe_latent_size": 16, "hidden_act": None},
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7]},
}
LENGTHS = (1, 2, 5, 21)


@pytest.mark.parametrize(
    "family", repeats(FAMILIES, *(FAMILIES.keys() - {"lfm3", "hunyuan_v1_dense", "falcon_h1", "nemotron_h"}))
)
def test_answers_follow_the_forward_pass(family, tiny_model):
    model = tiny_model(family, **{"num_hidden_layers": 3, "initializer_range": 0.3, **FAMILIES[family]})
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    engine, rng = Engine(graphdefs, model.config, dtype=jnp.float32), np.random.default_rng(0)
    sampling = SamplingConfig(temperature=0, max_tokens=12)
    requests = [Request(rng.integers(0, 97, size).tolist(), sampling, index) for index, size in enumerate(LENGTHS)]
    for completion in engine.generate(*trees, requests):
        prompt, answer = requests[completion.number].prompt, completion.tokens.tolist()
        logits = np.asarray(model(jnp.asarray([[*prompt, *answer]]))[0, len(prompt) - 1 : -1])
        chosen = logits[np.arange(len(answer)), answer]
        np.testing.assert_allclose(chosen, logits.max(-1), rtol=0, atol=1e-3)
        assert len(answer) == 12
