"""Mamba-2 in packed rows: documents as apart, whatever their neighbors, at the lengths of convolution and chunks."""

import jax.numpy as jnp
import pytest
from flax import nnx
from selection import repeats, repeats_parts_of

from jaxglue.models import build_model, config_from_hf
from jaxglue.models.mamba import read_limits
from tests.models.packed_documents import (
    check_continuations,
    check_neighbors_change_no_bit,
    check_packed_as_apart,
    rows,
)

LENGTHS = (1, 3, 4, 63, 5, 64, 2, 65)
TYPES = {
    "granitemoehybrid": {
        **{"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "num_local_experts": 0},
        **{"layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    },
    "falcon_h1": {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_ssm": 64},
}


@pytest.fixture(params=repeats(TYPES, "falcon_h1"))
def model(tiny_config, request):
    raw = {**tiny_config, **TYPES[request.param], "model_type": request.param, "num_hidden_layers": 2}
    return build_model(config_from_hf({**raw, "initializer_range": 0.3}), dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_packed_documents_are_as_apart(model):
    check_packed_as_apart(model, LENGTHS)


@repeats_parts_of("test_packed_documents_are_as_apart")
def test_a_changed_neighbor_changes_no_bit_of_values_or_gradients(model):
    check_neighbors_change_no_bit(model, LENGTHS)


def test_continuations_of_one_beginning_are_as_behind_copies_of_it(model):
    check_continuations(model, rows(0, model.config.vocab_size, LENGTHS)[:9])


def test_limits_of_step_sizes_are_read_in_every_spelling():
    infinity = float("inf")
    assert read_limits({}) == (0.0, infinity)
    for most in (infinity, "inf", {"__float__": "Infinity"}):
        assert read_limits({"time_step_limit": [0.1, most]}) == (0.1, infinity)
    with pytest.raises(ValueError, match=r"time_step_limit in config\.json"):
        read_limits({"time_step_limit": [0.1]})


def test_nemotrons_least_step_is_not_that_of_random_weights(tiny_config):
    """transformers 5.24 clamps from `time_step_min`; the published code does not."""
    raw = {**tiny_config, "model_type": "nemotron_h", "hybrid_override_pattern": "M*", "num_hidden_layers": 2}
    config = config_from_hf({**raw, "time_step_min": 0.001, "hidden_act": None})
    assert config.mixers[0].limits == (0.0, float("inf"))
