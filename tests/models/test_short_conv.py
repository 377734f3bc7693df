"""Short convolutions in packed rows: documents as apart, whatever their neighbors, at the lengths of their taps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.models import build_model, config_from_hf
from jaxglue.ops.segments import copy_beginnings, pack_forks, pack_segments
from tests.models.test_parity import forward

WIDTH = 3
LENGTHS = (1, WIDTH - 1, WIDTH, 2, WIDTH + 1, 5)
FIELDS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_L_cache": WIDTH}


@pytest.fixture
def model(tiny_config):
    raw = {**tiny_config, **FIELDS, "model_type": "lfm2", "conv_bias": True, "initializer_range": 0.3}
    return build_model(config_from_hf(raw), dtype=jnp.float32, rngs=nnx.Rngs(0))


def rows(seed, vocab):
    return np.random.default_rng(seed).integers(0, vocab, sum(LENGTHS))


def apart(model, documents):
    """Return the logits of documents, each in a row of its own."""
    sizes = [len(document) for document in documents]
    tokens = np.stack([np.pad(document, (0, max(sizes) - len(document))) for document in documents])
    logits = forward(model, tokens, pack_segments([[size] for size in sizes], seq_len=max(sizes)))
    return [row[:size] for row, size in zip(logits, sizes, strict=True)]


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
        np.testing.assert_allclose(logits[:4], whole[:4], rtol=0, atol=1e-5)
        np.testing.assert_allclose(logits[continuation], whole[4:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="segments fork"):
        forward(model, tokens[None], forked)
