import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.rope import ROPE_TYPES, RopeConfig, apply_rope, inverse_frequencies, rope_tables

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "rope.json").read_text())
CASES = GOLDEN["cases"]
LLAMA3 = next(case["config"] for case in CASES if case["config"]["rope_type"] == "llama3")


def test_goldens_cover_every_type():
    assert {case["config"]["rope_type"] for case in CASES} == set(ROPE_TYPES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["config"]["rope_type"])
def test_frequencies_match_transformers(case):
    config = RopeConfig.from_hf({"rope_parameters": case["config"]})
    frequencies, attention_factor = inverse_frequencies(config, GOLDEN["head_dim"])
    np.testing.assert_allclose(frequencies, case["inv_freq"], rtol=2e-6)
    assert attention_factor == pytest.approx(case["attention_factor"], rel=1e-6)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_configs_of_earlier_transformers_are_read(key):
    scaling = {name: value for name, value in LLAMA3.items() if name not in ("rope_theta", "rope_type")}
    raw = {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": {key: "llama3", **scaling}}
    assert RopeConfig.from_hf(raw) == RopeConfig.from_hf({"rope_parameters": LLAMA3})


def test_tables_hold_the_angle_of_each_token():
    config = RopeConfig.from_hf({"rope_parameters": CASES[0]["config"]})
    positions = np.array([[0, 1, 2, 0, 1, 0]], np.int32)
    cos, sin = rope_tables(positions, config, GOLDEN["head_dim"])
    angles = positions[..., None] * np.array(CASES[0]["inv_freq"])
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.broadcast_to(rng.normal(size=8).astype(np.float32), (1, 6, 1, 8)) for _ in range(2))
    cos, sin = rope_tables(jnp.arange(6)[None], RopeConfig(rope_theta=50.0), 8)
    scores = jnp.einsum("bqnh,bknh->qk", apply_rope(q, cos, sin), apply_rope(k, cos, sin))
    for distance in range(6):
        np.testing.assert_allclose(jnp.diagonal(scores, distance), scores[0, distance], rtol=1e-4)
    assert abs(scores[0, 1] - scores[0, 0]) > 1e-3


def test_unsupported_type_is_refused():
    with pytest.raises(ValueError, match="rope type 'mrope' is not supported: known are default, linear"):
        RopeConfig.from_hf({"rope_scaling": {"rope_type": "mrope"}})


def test_missing_parameter_is_named():
    with pytest.raises(ValueError, match="rope type 'linear' needs factor"):
        RopeConfig.from_hf({"rope_scaling": {"type": "linear"}})


def test_partial_rotation_is_refused():
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5 is not supported"):
        RopeConfig.from_hf({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})


YARN = {"type": "yarn", "factor": 4.0}
PRECEDENCE = [
    {"rope_scaling": {**YARN, "original_max_position_embeddings": 64}, "rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 77},
    {"rope_scaling": YARN, "max_position_embeddings": 512, "rope_theta": 50.0},
    {"rope_scaling": YARN, "rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 60.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 60.0}, "rope_theta": 50.0},
    {"rope_scaling": None, "rope_parameters": {**YARN, "original_max_position_embeddings": 64}},
]


@pytest.mark.parametrize("raw", PRECEDENCE)
def test_precedence_is_that_of_transformers(raw):
    from transformers import LlamaConfig

    theirs = LlamaConfig(**json.loads(json.dumps(raw)))
    theirs.standardize_rope_params()  # again, as its rotary embedding does
    ours = RopeConfig.from_hf(raw)
    for name, value in theirs.rope_parameters.items():
        assert name == "type" or getattr(ours, name) == value, name


def test_a_hidden_theta_is_reported(caplog):
    RopeConfig.from_hf({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert "rope_theta 1000000.0 of rope_parameters is unused" in caplog.text


def test_parameters_by_layer_type_are_refused():
    with pytest.raises(ValueError, match=r"rope_parameters by layer type \(full_attention\)"):
        RopeConfig.from_hf({"rope_parameters": {"full_attention": {"rope_type": "default"}}})


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_turns_the_first_dimensions_alone(interleaved):
    config = RopeConfig(rope_theta=50.0, partial_rotary_factor=0.5, interleaved=interleaved)
    cos, sin = rope_tables(jnp.arange(5)[None], config, 12)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 12)), jnp.float32)
    got = np.asarray(apply_rope(x, cos, sin, interleaved=interleaved))
    pairs = [(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)]
    expected = np.array(x)
    for i, pair in enumerate(pairs):
        turned = (x[..., pair[0]] + 1j * x[..., pair[1]]) * np.exp(1j * np.arange(5) * 50.0 ** (-2 * i / 6))[
            None, :, None
        ]
        expected[..., pair[0]], expected[..., pair[1]] = turned.real, turned.imag
    np.testing.assert_allclose(got, expected, atol=1e-6)
