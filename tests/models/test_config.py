from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.models import build_model, config_from_hf
from jaxglue.models.decoder import packed_context
from jaxglue.ops.rope import RopeConfig
from jaxglue.ops.segments import pack_segments

RAW = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
}
FAMILIES = ["llama", "qwen3"]


@pytest.mark.parametrize("model_type", ["bloom", "mamba", None])
def test_unsupported_model_type_is_refused_by_name(model_type):
    with pytest.raises(ValueError, match=f"model_type {model_type!r} is not supported: known are .*llama.*qwen3"):
        config_from_hf({**RAW, "model_type": model_type})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_unsupported_activation_is_refused_by_name(model_type):
    with pytest.raises(ValueError, match=f"hidden_act 'gelu' is not supported for {model_type}"):
        config_from_hf({**RAW, "model_type": model_type, "hidden_act": "gelu"})


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_unsupported_rope_type_is_refused_by_name(model_type, field):
    with pytest.raises(ValueError, match="rope type 'mrope' is not supported"):
        config_from_hf({**RAW, "model_type": model_type, field: {"rope_type": "mrope", "factor": 2.0}})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_fields_are_named(model_type):
    raw = {name: value for name, value in RAW.items() if name not in ("vocab_size", "num_hidden_layers")}
    with pytest.raises(ValueError, match=r"config\.json lacks vocab_size, num_hidden_layers"):
        config_from_hf({**raw, "model_type": model_type})


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["full_attention", "full_attention", "linear_attention"], "layer_types linear_attention are not supported"),
        (["full_attention"], "layer_types has 1 entries for num_hidden_layers=3"),
    ],
)
def test_unsupported_layer_types_are_refused_by_name(layer_types, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**RAW, "model_type": "qwen3", "layer_types": layer_types})


def test_heads_must_be_grouped_evenly():
    with pytest.raises(ValueError, match="num_attention_heads=4 must be a multiple of num_key_value_heads=3"):
        config_from_hf({**RAW, "model_type": "llama", "num_key_value_heads": 3})


@pytest.mark.parametrize(("model_type", "head_dim"), [("llama", 4), ("qwen3", 128)])
def test_head_dim_defaults_by_family(model_type, head_dim):
    config = config_from_hf({**RAW, "model_type": model_type})
    assert (config.head_dim, config.num_key_value_heads) == (head_dim, 4)


def test_null_means_the_default():
    config = config_from_hf({**RAW, "model_type": "llama", "head_dim": None, "num_key_value_heads": None})
    assert config == config_from_hf({**RAW, "model_type": "llama"})


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8}, (None, None, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_qwen3_windows_follow_the_config(fields, windows):
    assert config_from_hf({**RAW, "model_type": "qwen3", **fields}).layer_windows == windows


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("hidden_size", "16"),
        ("hidden_size", -16),
        ("num_attention_heads", 0),
        ("vocab_size", True),
        ("head_dim", 1.5),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("rope_theta", [1]),
        ("tie_word_embeddings", "yes"),
        ("layer_types", "full_attention"),
        ("layer_types", [1, 2, 3]),
        ("rope_scaling", 2.0),
        ("rope_parameters", []),
        ("quantization_config", "nf4"),
        ("model_type", ["llama"]),
        ("attention_dropout", 1.0),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_fields_of_wrong_type_or_range_are_named(model_type, field, value):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match=f"{field} in config.json: expected"):
        config_from_hf({**RAW, **experts, "model_type": model_type, field: value})


@pytest.mark.parametrize("value", ["4", float("nan"), float("inf"), -1.0, 0, True, [4.0]])
def test_rope_numbers_are_checked(value):
    with pytest.raises(
        ValueError, match=r"factor in config\.json's rope parameters: expected (a number > 0|one from 1e-12)"
    ):
        config_from_hf({**RAW, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": value}})


def test_gpt_oss_without_rope_fields_has_the_defaults_of_transformers():
    raw = {**RAW, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
    rope = config_from_hf(raw).rope
    assert (rope.rope_type, rope.factor, rope.truncate, rope.rope_theta) == ("yarn", 32.0, False, 150_000.0)
    assert config_from_hf({**raw, "rope_parameters": {}}).rope.rope_type == "default"


def test_layers_of_one_kind_share_window_rope_and_feed_forward():
    config = config_from_hf({**RAW, "model_type": "llama", "num_hidden_layers": 4})
    ropes = RopeConfig(), RopeConfig(rope_theta=5.0), None, RopeConfig()
    config = replace(config, layer_ropes=ropes, layer_windows=(None, None, None, 7))
    assert config.first_of_kind == (0, 1, 2, 3)
    assert [rotary.config for rotary in config.rotaries] == [RopeConfig(), RopeConfig(rope_theta=5.0)]
    assert config.with_layers([3, 1]).layer_ropes == ropes[3::-2]
    assert replace(config, layer_windows=(None,) * 4).first_of_kind == (0, 1, 2, 0)


@pytest.mark.parametrize("rope", [None, RopeConfig(rope_theta=3.0), RopeConfig(interleaved=True)])
def test_layers_rotate_by_their_own_tables(tiny_model, rope):
    config = tiny_model("llama").config
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, config.hidden_size)), jnp.float32)

    def last_layer(*ropes):
        changed = replace(config, layer_ropes=ropes)
        context = packed_context(changed, pack_segments([[6]], seq_len=6))
        return build_model(changed, dtype=jnp.float32, rngs=nnx.Rngs(0)).layers[2](x, context)

    mixed = last_layer(config.rope, config.rope, rope)
    np.testing.assert_array_equal(mixed, last_layer(rope, rope, rope))
    assert not np.allclose(mixed, last_layer(config.rope, config.rope, config.rope))
