"""Short convolutions in packed rows: documents as apart, whatever their neighbors, at the lengths of their taps."""

import jax.numpy as jnp
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.models import build_model, config_from_hf
from tests.models.packed_documents import (
    check_continuations,
    check_neighbors_change_no_bit,
    check_packed_as_apart,
    rows,
)

WIDTH = 3
LENGTHS = (1, WIDTH - 1, WIDTH, 2, WIDTH + 1, 5)
FIELDS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_L_cache": WIDTH}


@pytest.fixture
def model(tiny_config):
    raw = {**tiny_config, **FIELDS, "model_type": "lfm2", "conv_bias": True, "initializer_range": 0.3}
    return build_model(config_from_hf(raw), dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_packed_documents_are_as_apart(model):
    check_packed_as_apart(model, LENGTHS)


@repeats_parts_of("test_packed_documents_are_as_apart")
def test_a_changed_neighbor_changes_no_bit_of_values_or_gradients(model):
    check_neighbors_change_no_bit(model, LENGTHS)


def test_continuations_of_one_beginning_are_as_behind_copies_of_it(model):
    check_continuations(model, rows(0, model.config.vocab_size, LENGTHS)[:9])
