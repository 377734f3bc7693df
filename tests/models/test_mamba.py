"""Mamba-2 in packed rows: documents as apart, whatever their neighbors, at the lengths of convolution and chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.models import build_model, config_from_hf
from jaxglue.models.mamba import read_limits
from jaxglue.ops.segments import copy_beginnings, pack_forks, pack_segments
from tests.models.test_parity import forward
from tests.models.test_short_conv import apart

LENGTHS = (1, 3, 4, 63, 5, 64, 2, 65)
TYPES = {
    "granitemoehybrid": {
        **{"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "num_local_experts": 0},
        **{"layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    },
    "falcon_h1": {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_ssm": 64},
}


@pytest.fixture(params=TYPES)
def model(tiny_config, request):
    raw = {**tiny_config, **TYPES[request.param], "model_type": request.param, "num_hidden_layers": 2}
    return build_model(config_from_hf({**raw, "initializer_range": 0.3}), dtype=jnp.float32, rngs=nnx.Rngs(0))


def rows(seed, vocab):
    return np.random.default_rng(seed).integers(0, vocab, sum(LENGTHS))


def test_packed_documents_are_as_apart(model):
    tokens = rows(0, model.config.vocab_size)
    packed = forward(model, tokens[None], pack_segments([list(LENGTHS)], seq_len=len(tokens)))[0]
    documents = np.split(tokens, np.cumsum(LENGTHS)[:-1])
    np.testing.assert_allclose(packed, np.concatenate(apart(model, documents)), rtol=0, atol=1e-5)


def test_a_changed_neighbor_changes_no_bit_of_values_or_gradients(model):
    graphdef, state = nnx.split(model)
    segments = pack_segments([list(LENGTHS)], seq_len=sum(LENGTHS))

    @jax.jit
    def values(state, tokens, counted):
        def total(state):
            logits = nnx.merge(graphdef, state)(tokens[None], segments)[0]
            return jnp.where(counted[:, None], logits, 0.0).sum(), logits

        return jax.grad(total, has_aux=True)(state)

    tokens = rows(0, model.config.vocab_size)
    for index, end in enumerate(np.cumsum(LENGTHS)):
        counted = np.zeros(len(tokens), bool)
        counted[end - LENGTHS[index] : end] = True
        changed = np.where(counted, tokens, rows(1, model.config.vocab_size))
        results = [values(state, jnp.asarray(row), counted) for row in (tokens, changed)]
        for first, second in zip(*(jax.tree.leaves(gradients["layers"]) for gradients, _ in results), strict=True):
            np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(*(logits[counted] for _, logits in results))


def test_continuations_of_one_beginning_are_as_behind_copies_of_it(model):
    tokens = rows(0, model.config.vocab_size)[:9]
    forked = pack_forks([[(4, 2, 3)]], seq_len=9)
    logits = forward(model, tokens[None], copy_beginnings(forked))[0]
    continuations = slice(4, 6), slice(6, 9)
    alone = apart(model, [np.concatenate([tokens[:4], tokens[own]]) for own in continuations])
    for continuation, whole in zip(continuations, alone, strict=True):
        np.testing.assert_allclose(logits[continuation], whole[4:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="segments fork"):
        forward(model, tokens[None], forked)


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
