"""Fields of config.json that are absent, null or contradict each other, as transformers reads them."""

import json
import math
from contextlib import suppress
from operator import attrgetter

import pytest

from jaxglue.models import config_from_hf
from jaxglue.models.config import ATTENTION
from jaxglue.models.olmo_hybrid import SeparateDeltaConfig
from tests.models.test_family_goldens import FAMILIES, GOLDENS, read_golden

RAW = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 20,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
EXPERTS |= {"shared_expert_intermediate_size": 24}
KINDS = ["full_attention", "sliding_attention"]
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
GLM4_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
OLMO = SeparateDeltaConfig(num_key_heads=4, num_value_heads=4, key_dim=12, value_dim=24, conv_width=4, largest_beta=2.0)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("qwen2", {"sliding_window": 8}, {"layer_windows": (None,) * 6, "attention_bias": True}),
        ("qwen2", {"attention_bias": False, "mlp_bias": True}, {"attention_bias": True, "mlp_bias": False}),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 4},
            {"layer_windows": (*(None,) * 4, 4096, 4096), "attention.output_bias": False},
        ),
        ("mistral", {}, {"layer_windows": (4096,) * 6, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}),
        ("mistral", {"num_key_value_heads": None}, {"num_key_value_heads": 32, "head_dim": 2}),
        ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"]}, {"layer_windows": (None,) * 6}),
        ("mistral", {"sliding_window": 8, "layer_types": KINDS * 3}, {"layer_windows": (None, 8) * 3}),
        ("ministral", {}, {"layer_windows": (4096,) * 6, "num_key_value_heads": 8}),
        ("qwen3", {"mlp_bias": True, "attention_bias": True}, {"mlp_bias": False, "attention_bias": True}),
        ("granite", {}, {"attention.scale": 1.0, "scales.logit_divisor": 1.0, "num_key_value_heads": 32}),
        (
            "granite",
            {"attention_multiplier": None, "logits_scaling": 8},
            {"attention.scale": 1.0, "scales.logit_divisor": 8},
        ),
        ("olmo2", {}, {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_key_value_heads": 32}),
        ("olmo2", {"rms_norm_eps": None}, {"rms_norm_eps": 1e-5}),
        ("olmo3", {}, {"layer_windows": (4096, 4096, 4096, None, 4096, 4096)}),
        (
            "olmo_hybrid",
            {"num_attention_heads": 4},
            {"layer_ropes": (None,) * 6, "mixers": (*(OLMO,) * 3, ATTENTION, OLMO, ATTENTION)},
        ),
        ("smollm3", {}, {"tie_word_embeddings": True, "num_key_value_heads": 4, "layer_windows": (None,) * 6}),
        (
            "smollm3",
            {"sliding_window": 8, "use_sliding_window": True},
            {"layer_windows": (None, None, None, 8, None, None)},
        ),
        ("smollm3", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 6}, {"layer_windows": (8,) * 6}),
        ("gemma4_text", {}, {"layer_windows": (*(512,) * 5, None), "attention.scale": 1.0, "shared_width": 0}),
        ("gemma4_text", {"head_dim": 64, "layer_types": ["sliding_attention"] * 6}, {"head_dim": 64}),
        ("gemma2", {}, {"layer_windows": (4096, None) * 3, "attention.softcap": 50.0, "scales.logit_softcap": 30.0}),
        ("gemma2", {"hidden_act": "silu"}, {"activation": "gelu_tanh", "head_dim": 256, "attention.scale": 1 / 16}),
        ("gemma2", {"attn_logit_softcapping": None}, {"attention.softcap": None, "scales.embedding": 8.0}),
        ("gemma2", {"head_dim": 64, "query_pre_attn_scalar": 144}, {"head_dim": 64, "attention.scale": 1 / 12}),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 50.0, "sliding_window": 8},
            {"attention.softcap": None, "scales.logit_softcap": None, "layer_windows": (*(8,) * 5, None)},
        ),
        ("gemma3_text", {"sliding_window_pattern": 2}, {"layer_windows": (4096, None) * 3}),
        ("glm4", {}, {"attention_bias": True, "attention.output_bias": False, "num_key_value_heads": 2}),
        ("glm4", {"attention_bias": False}, {"attention_bias": False, "head_dim": 128, "rms_norm_eps": 1.5625e-7}),
        ("phi3", {"attention_bias": True}, {"attention_bias": False, "layer_windows": (None,) * 6, "head_dim": 2}),
        ("ministral3", {}, {"layer_windows": (None,) * 6, "head_dim": 128, "rms_norm_eps": 1e-5}),
        ("mixtral", {}, {"layer_windows": (None,) * 6, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
        (
            "mixtral",
            {"sliding_window": 8, "attention_bias": True},
            {"layer_windows": (8,) * 6, "attention_bias": False},
        ),
        ("qwen2_moe", {**EXPERTS, "sliding_window": 0}, {"layer_windows": (None,) * 6, "attention_bias": True}),
        (
            "qwen2_moe",
            {**EXPERTS, "qkv_bias": False, "use_sliding_window": True, "max_window_layers": 3},
            {"layer_windows": (4096, None, 4096, None, None, None), "attention_bias": False},
        ),
        ("qwen3_5_moe_text", EXPERTS, {"head_dim": 256, "first_of_kind": (0, 0, 0, 3, 0, 0)}),
        ("seed_oss", {}, {"attention_bias": True, "attention.output_bias": False, "head_dim": 128}),
        ("exaone4", {"sliding_window_pattern": "LGL"}, {"layer_windows": (4096, None, 4096, 4096, None, None)}),
        ("exaone4", {"sliding_window": None}, {"layer_windows": (None,) * 6}),
        ("cohere2", {}, {"layer_windows": (*(4096,) * 3, None, *(4096,) * 2), "scales.logit_divisor": 16.0}),
        (
            "hunyuan_v1_dense",
            {"head_dim": 128, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
            {"rope.rope_type": "default", "rope.rope_theta": 1e4 * 1000 ** (128 / 126)},
        ),
        ("minimax_m2", {"rotary_dim": 64}, {"rope.partial_rotary_factor": 0.5, "rope.rope_theta": 5e6}),
        ("lfm2", {"intermediate_size": 12_288}, {"intermediate_size": 8192, "recurrent": None}),
        ("lfm2", {"block_ff_dim": 40, "block_auto_adjust_ff_dim": False}, {"intermediate_size": 40}),
        ("lfm2", {"full_attn_idxs": [2]}, {"recurrent": "short convolutions", "first_of_kind": (0, 0, 2, 0, 0, 0)}),
        ("lfm3", {}, {"layer_windows": (*(None,) * 4, 256, None), "first_of_kind": (0, 0, 2, 0, 4, 0)}),
        ("muse_glimmer_text", {}, {"layer_windows": (2048, None, *(2048,) * 3, None), "scales.logit_softcap": 20.0}),
        ("gemma4_unified_text", {}, {"layer_windows": (*(1024,) * 5, None), "per_layer": None}),
        (
            "glm4_moe",
            GLM4_MOE,
            {"head_dim": 2, "attention.head_norms": False, "attention_bias": False, "attention.output_bias": False},
        ),
    ],
)
def test_defaults_are_those_of_transformers(model_type, fields, expected):
    config = config_from_hf({**RAW, "model_type": model_type, **fields})
    assert {name: attrgetter(name)(config) for name in expected} == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mixtral", {}, {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 20, "shared_size": 0}),
        ("mixtral", {"num_experts": 4, "norm_topk_prob": False}, {"num_experts": 4, "norm_topk_prob": True}),
        ("qwen2_moe", EXPERTS, {"norm_topk_prob": False, "shared_size": 24, "sparse_layers": (True,) * 6}),
        ("qwen3_5_moe_text", EXPERTS, {"norm_topk_prob": True, "shared_size": 24, "sparse_layers": (True,) * 6}),
        (
            "qwen2_moe",
            {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
            {"norm_topk_prob": True, "sparse_layers": (False, False, False, True, False, True)},
        ),
        (
            "glm4_moe",
            GLM4_MOE,
            {"sparse_layers": (False, *(True,) * 5), "norm_topk_prob": True, "routed_scale": 1.0, "groups": (1, 1)},
        ),
        (
            "glm4_moe",
            {**GLM4_MOE, "first_k_dense_replace": 0, "n_shared_experts": 2, "n_group": 4, "topk_group": 2},
            {"sparse_layers": (True,) * 6, "shared_size": 24, "groups": (4, 2)},
        ),
        (
            "deepseek_v3",
            {**GLM4_MOE, **LATENT, "topk_group": None, "n_group": 4},
            {"sparse_layers": (*(False,) * 3, *(True,) * 3), "routed_scale": 2.5, "groups": (4, 4)},
        ),
        ("deepseek_v3", {**GLM4_MOE, **LATENT, "norm_topk_prob": None, "n_group": 4}, {"norm_topk_prob": False}),
        (
            "deepseek_v2",
            {**GLM4_MOE, **LATENT, "norm_topk_prob": True, "n_group": 4, "topk_group": 2},
            {"sparse_layers": (True,) * 6, "norm_topk_prob": False, "groups": (1, 1), "shared_size": 24},
        ),
        (
            "glm4_moe_lite",
            {**GLM4_MOE, **LATENT, "first_k_dense_replace": 3},
            {"sparse_layers": (False, *(True,) * 5), "routed_scale": 1.8},
        ),
        (
            "glm4_moe_lite",
            {**GLM4_MOE, **LATENT, "mlp_layer_types": ["sparse", "dense"] * 3},
            {"sparse_layers": (True, False) * 3},
        ),
    ],
)
def test_experts_are_read(model_type, fields, expected):
    moe = config_from_hf({**RAW, "model_type": model_type, **fields}).moe
    assert {name: getattr(moe, name) for name in expected} == expected


DEFAULTS = json.loads((GOLDENS / "defaults.json").read_text())
GIVEN = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
GIVEN |= {"use_sliding_window", "model_type"}
"""Fields of `defaults.json` with other values than the defaults."""


def whole(model_type):
    """Return a config.json that lacks nothing."""
    latent = {"num_key_value_heads": 64} if "kv_lora_rank" in DEFAULTS[model_type] else {}
    kinds = {"layer_types": ["conv", "full_attention"] * 15} if model_type == "lfm2_moe" else {}  # which it must have
    return {"num_experts_per_tok": 2, **DEFAULTS[model_type], **latent, **kinds}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_absent_fields_are_those_of_transformers(model_type):
    fields = whole(model_type)
    expected, read = config_from_hf(fields), 0
    for name in fields.keys() - GIVEN:
        with suppress(ValueError):  # one that config.json must have
            assert config_from_hf({key: value for key, value in fields.items() if key != name}) == expected, name
            read += 1
    assert read > 3


@pytest.mark.parametrize("model_type", ["olmo3", "gemma3_text"])
def test_a_length_outside_of_types_counts_for_nothing(model_type):
    raw = {**RAW, "model_type": model_type, "head_dim": 2, "max_position_embeddings": 64}
    raw |= {"original_max_position_embeddings": 16, "rope_parameters": {"full_attention": LONG}}
    rope = config_from_hf(raw).layer_kinds[3 if model_type == "olmo3" else 5].rope
    assert (rope.rope_type, rope.original_max_position_embeddings, rope.factor) == ("longrope", 64, 1.0)


@pytest.mark.parametrize("model_type", DEFAULTS)
@pytest.mark.parametrize("null", [False, True])
def test_absent_sizes_are_named(model_type, null):
    fields = whole(model_type)
    for name in GIVEN - {"use_sliding_window", "model_type"}:
        raw = {key: value for key, value in fields.items() if key != name}
        if model_type != "qwen3_5_moe_text" or name != "intermediate_size":  # of dense layers, which it has not
            with pytest.raises(ValueError, match=f"lacks .*{name}"):
                config_from_hf({**raw, name: None} if null else raw)


def test_latent_attention_is_scaled_as_yarn_says():
    raw = {**RAW, **GLM4_MOE, **LATENT, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
    plain, scaled = (config_from_hf({**raw, "rope_scaling": rope}) for rope in (None, {**YARN, "mscale_all_dim": 0.5}))
    assert (plain.head_dim, plain.attention.scale, plain.num_key_value_heads) == (12, None, 32)
    assert scaled.attention.scale == pytest.approx((0.05 * math.log(4) + 1) ** 2 / 12**0.5)
    assert {(rotary.dims, rotary.config.interleaved) for rotary in scaled.rotaries} == {(4, True)}


@pytest.mark.parametrize(
    ("model_type", "fields", "thetas", "full_type"),
    [
        ("olmo3", {}, (500_000.0, 500_000.0), "default"),
        ("olmo3", {"rope_theta": 7.0, "rope_scaling": YARN}, (500_000.0, 7.0), "yarn"),
        ("olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, (500_000.0, 500_000.0), "default"),
        ("gemma3_text", {}, (10_000.0, 1_000_000.0), "default"),
        ("gemma3_text", {"rope_theta": 7.0, "rope_local_base_freq": 3.0, "rope_scaling": YARN}, (3.0, 7.0), "yarn"),
        (
            "gemma3_text",
            {"rope_theta": 7.0, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 3.0}}},
            (3.0, 7.0),
            "yarn",
        ),
        ("smollm3", {}, (2_000_000.0, None), "default"),
        ("smollm3", {"rope_theta": 7.0, "no_rope_layers": [0, 1, 0, 1, 1, 1]}, (None, 7.0), "default"),
    ],
)
def test_layers_turn_by_their_type(model_type, fields, thetas, full_type):
    config = config_from_hf({**RAW, "model_type": model_type, **fields})
    found = [kind.rope and kind.rope.rope_theta for kind in config.layer_kinds]
    full = 5 if model_type == "gemma3_text" else 3
    assert (found[0], found[full]) == thetas
    rope = config.layer_kinds[full].rope
    assert rope is None or rope.rope_type == full_type
    assert config.layer_kinds[0].rope is None or config.layer_kinds[0].rope.rope_type == "default"


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("glm4", {}, {"partial_rotary_factor": 0.5, "interleaved": True}),
        ("glm4", {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}),
        (
            "glm4_moe",
            {**GLM4_MOE, "head_dim": 8},
            {"partial_rotary_factor": 0.5, "interleaved": False, "rope_theta": 10_000.0},
        ),
        (
            "llama",
            {"rope_scaling": {**LONG, "original_max_position_embeddings": 16.0}, "max_position_embeddings": 64},
            {"rope_type": "longrope", "factor": 4.0},
        ),
        ("phi3", {"partial_rotary_factor": 0.75}, {"partial_rotary_factor": 0.75, "interleaved": False}),
        ("ministral3", {}, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "query_scale": (0.1, 16_384)}),
        (
            "ministral3",
            {"rope_scaling": {**YARN, "llama_4_scaling_beta": 1}, "rope_parameters": {"rope_theta": 3.0}},
            {"query_scale": (1.0, 16), "rope_theta": 10_000.0},
        ),
        (
            "ministral3",
            {"original_max_position_embeddings": 32},
            {"query_scale": (0.1, 32), "original_max_position_embeddings": 32},
        ),
        ("llama", {"rope_scaling": {**YARN, "llama_4_scaling_beta": 1}}, {"query_scale": None}),
    ],
)
def test_rotary_embeddings_are_read(model_type, fields, expected):
    rope = config_from_hf({**RAW, "model_type": model_type, **fields}).rope
    assert {name: getattr(rope, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen2: only 'silu' is"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_act 'silu' is not supported for gemma2"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention in config.json"),
        ("gemma4_text", {"enable_moe_block": True}, "config.json lacks num_experts, top_k_experts, moe_intermediate"),
        (
            "gemma4_text",
            {**GEMMA4_EXPERTS, "top_k_experts": 9},
            "top_k_experts=9 in config.json is above num_experts=8",
        ),
        ("gemma4_text", {"rope_parameters": {"rope_theta": 3.0}}, "gemma4_text reads rope_parameters by type of layer"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "no earlier layer is of type full_attention"),
        ("gemma4_text", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 of 6 layers: at least one"),
        ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 7}}}, "layer 5 of config.json has head_dim=7"),
        ("gemma4_text", {"per_layer_config": {"5": {"intermediate_size": 7}}}, "got '5': {'intermediate_size': 7}"),
        ("gemma4_text", {"per_layer_config": {"06": {"head_dim": 8}}}, "expected layers below 6 with head_dim and num"),
        ("qwen3", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config in config.json is not supported for"),
        ("olmo3", {"num_hidden_layers": 6.0}, "num_hidden_layers in config.json: expected int >= 1 .*, got 6.0"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for num_hidden_layers=6"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier in config.json: expected"),
        ("olmo3", {"layer_types": ["linear_attention"] * 6}, "layer_types linear_attention are not supported"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "rope_parameters in config.json: expected an obj"),
        (
            "olmo3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "names its type 'linear' as type, which transfo",
        ),
        ("phi3", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope type 'llama3' is not supported for phi3"),
        ("phi3", {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "rope type 'longrope' needs short_factor"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0, 2.0]}},
            "short_factor in config.json's rope parameters has 2 entries, expected 1",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "long_factor": [-1], "short_factor": [1.0]}},
            "long_factor in config.json's rope parameters: expected numbers > 0",
        ),
        ("ministral3", {"rope_parameters": YARN}, "ministral3 needs numbers llama_4_scaling_beta"),
        ("llava", {"text_config": {"model_type": "mistral"}}, "its text model, mistral, is; give a folder of that"),
        ("gemma3", {"text_config": 3}, "text_config in config.json: gemma3 needs an object, got 3"),
        ("gemma5", {"text_config": 3}, "model_type 'gemma5' is not supported: known are .*; the nearest is gemma"),
        (
            "deepseek_v32",
            {"kv_lora_rank": 8, "index_topk": 8, "n_routed_experts": 4, "vision_config": None},
            r"the nearest is deepseek_v3. Its .* names attention to keys that an indexer chooses \(index_topk\)$",
        ),
        ("olmo3", {"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
        ("gemma2", {"hidden_size": None}, "config.json lacks hidden_size"),
        ("mixtral", {"sliding_window": 0}, "sliding_window in config.json: expected at least 1 token"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be between 1 and num_experts=8"),
        ("deepseek_v3", GLM4_MOE, "config.json lacks kv_lora_rank, qk_rope_head_dim"),
        (
            "deepseek_v3",
            {**GLM4_MOE, **LATENT, "head_dim": 8},
            "head_dim=8 in config.json contradicts qk_rope_head_dim=4",
        ),
        ("deepseek_v2", {**GLM4_MOE, **LATENT, "v_head_dim": 13}, "v_head_dim=13 in config.json is above"),
        (
            "deepseek_v2",
            {**GLM4_MOE, **LATENT, "num_key_value_heads": 4},
            "num_key_value_heads=4 in config.json: latent",
        ),
        ("deepseek_v2", {**GLM4_MOE, **LATENT, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc' in config.json"),
        (
            "deepseek_v2",
            {**GLM4_MOE, **LATENT, "topk_method": "group_limited_greedy"},
            "topk_method group_limited_greedy in config.json needs n_group and topk_group",
        ),
        (
            "glm4_moe_lite",
            {**GLM4_MOE, **LATENT, "mlp_layer_types": ["dense"]},
            "expected dense or sparse for each of 6",
        ),
        ("glm4_moe", {}, "config.json lacks n_routed_experts, num_experts_per_tok, moe_intermediate_size"),
        ("glm4_moe", {**GLM4_MOE, "n_group": 3}, "n_group=3 and topk_group=1: groups must divide the 8 experts"),
        ("glm4_moe", {**GLM4_MOE, "n_group": 8}, "n_group=8 leaves groups of one of 8 experts"),
        (
            "glm4_moe",
            {**GLM4_MOE, "n_group": 4, "num_experts_per_tok": 3},
            "num_experts_per_tok=3 is above the 2 experts of the groups that a token keeps",
        ),
        ("glm4_moe", {**GLM4_MOE, "n_group": 2, "topk_group": 3}, "topk_group=3: groups must divide"),
        ("glm4_moe", {**GLM4_MOE, "n_shared_experts": 0}, "n_shared_experts in config.json"),
        (
            "qwen3_5_moe_text",
            {},
            "config.json lacks num_experts, num_experts_per_tok, moe_intermediate_size, shared_ex",
        ),
        ("deepseek_v2", {"num_hidden_layers": None}, "config.json lacks num_hidden_layers, n_routed_experts"),
        ("qwen2_moe", {}, "config.json lacks num_experts, num_experts_per_tok, moe_intermediate_size, shared_expert"),
        ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step in config.json: expected int >= 1"),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size in config"),
        ("exaone4", {"sliding_window_pattern": "LX"}, "or letters L and G, got 'LX'"),
        ("cohere2", {"sliding_window_pattern": "LLLG"}, "expected a number above 0, got 'LLLG'"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 9.0}}, "head_dim above 2, got alpha=9.0"),
        ("muse_glimmer_text", {"layer_rope_theta": [0.0]}, "layer_rope_theta has 1 entries"),
        ("minimax_m2", {"rotary_dim": 0}, "rotary_dim in config.json: expected int >= 1"),
        ("ernie4_5_moe", {"moe_k": 0}, "moe_k in config.json: expected int >= 1"),
        ("lfm2", {"layer_types": ["conv"]}, "expected conv or full_attention for each of 6 layers"),
        ("lfm2_moe", EXPERTS, "config.json lacks layer_types"),
        ("lfm2_moe", {"layer_types": ["conv"] * 6, "use_expert_bias": False}, "use_expert_bias=false"),
        ("lfm3", {"use_sandwich_norm": False}, "use_sandwich_norm=false in config.json"),
        ("lfm3", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "is unread by transformers"),
    ],
)
def test_what_is_not_supported_is_refused(model_type, fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**RAW, "model_type": model_type, **fields})


def test_gemma_4_reads_sizes_of_layers_in_both_forms():
    raw = {**RAW, "model_type": "gemma4_text", "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    older = config_from_hf({**raw, "num_global_key_value_heads": 2, "global_head_dim": 128})
    newer = config_from_hf({**raw, "per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": 2}}})
    assert older == newer
    shapes = older.layer_shapes
    assert (shapes[0].head_dim, shapes[0].kv_heads, shapes[0].keys_as_values) == (256, 4, False)
    assert (shapes[5].head_dim, shapes[5].kv_heads, shapes[5].keys_as_values) == (128, 2, True)
    assert config_from_hf(raw).layer_shapes[5].head_dim == 512
    own = {"head_dim": 128, "num_key_value_heads": 2}  # of a dozen layers, written by transformers 5
    dozen = config_from_hf({**raw, "num_hidden_layers": 12, "per_layer_config": {"05": own, "11": own}})
    assert dozen.layer_shapes[:6] == shapes and dozen.layer_shapes[6:] == shapes


def test_mistral_inside_another_model_has_one_window():
    text = {**RAW, "sliding_window": 5, "layer_types": ["full_attention"] * 5 + ["sliding_attention"]}
    alone = config_from_hf({**text, "model_type": "mistral"})
    inside = config_from_hf({"model_type": "mistral3", "text_config": {**text, "model_type": "mistral"}})
    assert alone.layer_windows == (None,) * 5 + (5,) and inside.layer_windows == (5,) * 6


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_and_null_fields_have_defaults_or_are_named(name):
    raw, _ = read_golden(name)
    for field in raw:
        for other in ({**raw, field: None}, {key: value for key, value in raw.items() if key != field}):
            with suppress(ValueError):  # and no other error
                config_from_hf(other)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"sliding_window": 8, "use_sliding_window": False}])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "smollm3", "llama", "phi3", "granite"])
def test_layers_that_slide_without_a_window_are_refused(model_type, fields):
    raw = RAW | {"model_type": model_type, "layer_types": ["sliding_attention"] * 6, "pad_token_id": 0}
    if fields.get("sliding_window") and model_type in ("llama", "phi3", "granite", "smollm3"):
        return  # they slide, or have no windows in transformers either
    with pytest.raises(ValueError, match=r"layer_types in config\.json says that layers slide, and there is no window"):
        config_from_hf({**raw, **fields})


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 1e300}}, "mscale_all_dim in config.json.*1e[+]?12"),
        ("qwen3", {"rope_scaling": YARN | {"beta_fast": 5e-324}}, "beta_fast in config.json's rope parameters"),
        ("qwen3", {"initializer_range": 2**31}, "initializer_range in config.json"),
        ("granite", {"embedding_multiplier": 1e300}, "embedding_multiplier in config.json"),
        (
            "exaone4",
            {"sliding_window_pattern": 2.5},
            "sliding_window_pattern in config.json: expected a number above 0",
        ),
        ("exaone4", {"sliding_window_pattern": -1}, "sliding_window_pattern in config.json: expected a number above 0"),
        *(
            (
                "hunyuan_v1_dense",
                {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 1e6}},
                "head_dim above 2",
            ),
            (
                "hunyuan_v1_dense",
                {"head_dim": 8, "rope_scaling": {"type": "dynamic", "alpha": 8, "rope_theta": "x"}},
                "got rope_theta='x'",
            ),
        ),
    ],
)
def test_numbers_far_from_published_ones_are_refused(model_type, fields, message):
    raw = RAW | LATENT | GLM4_MOE | {"model_type": model_type, "num_attention_heads": 8, "moe_intermediate_size": 8}
    with pytest.raises(ValueError, match=message):
        config_from_hf({**raw, **fields})
