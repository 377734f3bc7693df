"""Settings of the family with linear attention; tests/models/test_parity.py compares its outputs."""

import jax.numpy as jnp
import pytest

from jaxglue.generation.pages import plan_cache
from jaxglue.hf.loading import random_model
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.config import ATTENTION
from jaxglue.models.lora import linear_shapes
from jaxglue.models.parameters import abstract_parameters
from jaxglue.sharding.mesh import MeshShape


@pytest.fixture
def raw(tiny_config):
    return {**tiny_config, "model_type": "qwen3_5_text", "num_hidden_layers": 8}


def test_one_layer_of_four_attends_by_default(raw):
    config = config_from_hf(raw)
    delta = config.mixers[0]
    assert [mixer.recurrent for mixer in config.mixers] == [True, True, True, False] * 2
    assert config.first_of_kind == (0, 0, 0, 3) * 2
    assert config_from_hf({**raw, "full_attention_interval": 2}).mixers == (delta, ATTENTION) * 4
    assert (delta.channels, config.rope.partial_rotary_factor) == (8192, 0.25)
    del raw["head_dim"]
    assert config_from_hf(raw).head_dim == 256


def test_adapters_have_the_names_of_peft(raw):
    shapes = linear_shapes(abstract_model(config_from_hf(raw)))
    linear = {name.rpartition(".")[2]: shape for name, shape in shapes.items() if ".layers.0.linear_attn." in name}
    assert linear == {
        "in_proj_qkv": (8192, 32),
        "in_proj_z": (4096, 32),
        "in_proj_b": (32, 32),
        "in_proj_a": (32, 32),
        "out_proj": (32, 4096),
    }
    assert shapes["model.layers.3.self_attn.q_proj"] == (2 * 4 * 16, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types sliding_attention are not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 must be a multiple of linear_num_key_heads=16"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim in config.json"),
    ],
)
def test_wrong_settings_are_named(raw, change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**raw, **change})


def test_states_take_memory_however_long_a_text_is(raw):
    config = config_from_hf(raw)
    size = lambda length: plan_cache([(4, length)], config, jnp.bfloat16, free=2**40).bytes  # noqa: E731
    state = 6 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    page = 64 * 2 * 2 * 2 * 2 * 16
    assert size(64) == 2 * state + (1 + 2) * page
    assert size(640) == 2 * state + (1 + 10) * page


def test_tensor_meshes_are_refused(raw):
    config = config_from_hf(raw)
    with pytest.raises(ValueError, match="tensor cannot split linear attention"):
        MeshShape(tensor=2).check(config, batch_size=1, devices=2)


def test_random_states_decay_and_norms_of_their_outputs_have_unit_weights(raw):
    """The norm of a head's output multiplies by its weight, not by 1 + weight as the family's others."""
    raw["linear_num_value_heads"] = 64
    attention = random_model(config_from_hf({**raw, "num_hidden_layers": 1}), dtype=jnp.float32).layers[0].linear_attn
    decays = jnp.exp(attention.A_log[...])
    assert 0 < decays.min() < 4 < 12 < decays.max() < 16
    assert jnp.all(attention.norm.weight[...] == 1) and jnp.all(attention.dt_bias[...] == 1)


def test_decays_and_norms_of_linear_attention_stay_in_float32(raw):
    raw |= {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    specs = abstract_parameters(abstract_model(config_from_hf(raw), dtype=jnp.bfloat16))
    wide = {name.removeprefix("model.layers.0.linear_attn.") for name, spec in specs.items() if spec.dtype == "float32"}
    assert wide == {"A_log", "dt_bias", "norm.weight"}
