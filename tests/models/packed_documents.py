"""Checks of models whose layers follow a document's tokens: packed as apart, whatever the neighbors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.ops.segments import copy_beginnings, pack_forks, pack_segments
from tests.models.test_parity import forward


def rows(seed, vocab, lengths):
    """Return random tokens of documents of these lengths, one after the other."""
    return np.random.default_rng(seed).integers(0, vocab, sum(lengths))


def apart(model, documents):
    """Return the logits of documents, each in a row of its own."""
    sizes = [len(document) for document in documents]
    tokens = np.stack([np.pad(document, (0, max(sizes) - len(document))) for document in documents])
    logits = forward(model, tokens, pack_segments([[size] for size in sizes], seq_len=max(sizes)))
    return [row[:size] for row, size in zip(logits, sizes, strict=True)]


def check_packed_as_apart(model, lengths):
    """Compare logits of a packed row with those of its documents, each in a row of its own."""
    tokens = rows(0, model.config.vocab_size, lengths)
    packed = forward(model, tokens[None], pack_segments([list(lengths)], seq_len=len(tokens)))[0]
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    wanted = np.concatenate(apart(model, documents))
    np.testing.assert_allclose(packed, wanted, rtol=0, atol=1e-5 * max(1.0, np.abs(wanted).max()))


def check_neighbors_change_no_bit(model, lengths):
    """Compare logits of each document, and the gradients of their sum, with those beside other documents."""
    graphdef, state = nnx.split(model)
    segments = pack_segments([list(lengths)], seq_len=sum(lengths))

    @jax.jit
    def values(state, tokens, counted):
        def total(state):
            logits = nnx.merge(graphdef, state)(tokens[None], segments)[0]
            return jnp.where(counted[:, None], logits, 0.0).sum(), logits

        return jax.grad(total, has_aux=True)(state)

    tokens = rows(0, model.config.vocab_size, lengths)
    for index, end in enumerate(np.cumsum(lengths)):
        counted = np.zeros(len(tokens), bool)
        counted[end - lengths[index] : end] = True
        changed = np.where(counted, tokens, rows(1, model.config.vocab_size, lengths))
        results = [values(state, jnp.asarray(row), counted) for row in (tokens, changed)]
        for first, second in zip(*(jax.tree.leaves(gradients["layers"]) for gradients, _ in results), strict=True):
            np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(*(logits[counted] for _, logits in results))


def check_continuations(model, tokens):
    """Compare two continuations of one beginning of nine tokens with each behind a copy of it."""
    forked = pack_forks([[(4, 2, 3)]], seq_len=9)
    logits = forward(model, tokens[None], copy_beginnings(forked))[0]
    continuations = slice(4, 6), slice(6, 9)
    alone = apart(model, [np.concatenate([tokens[:4], tokens[continuation]]) for continuation in continuations])
    for continuation, document in zip(continuations, alone, strict=True):
        np.testing.assert_allclose(logits[:4], document[:4], rtol=0, atol=1e-5)
        np.testing.assert_allclose(logits[continuation], document[4:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="segments fork"):
        forward(model, tokens[None], forked)
