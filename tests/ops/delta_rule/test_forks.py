"""Continuations of one beginning, which a row holds once: each as in a document of its own."""

from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.delta_rule import DELTA_RULE, DeltaHeads, causal_convolution, gated_delta_rule
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.segments import copy_beginnings, pack_forks, pack_segments
from tests.closeness import assert_close, outputs_and_gradients

HEADS, V, T = DeltaHeads(1, 2, 16), 32, 76
ROWS = [[(33, 7, 1, 5), (4, 2), (1, 9, 3)], [(0, 5, 6), (2, 0, 3), (40, 1, 1, 1, 1)]]


def documents(rows):
    """Indices in the forked rows of each continuation with its beginning, as a row of documents."""
    found = []
    for row in rows:
        own, at = [], 0
        for beginning, *continuations in row:
            begin = at + beginning
            for size in continuations:
                own += [[*range(at, at + beginning), *range(begin, begin + size)]] if size else []
                begin += size
            at = begin
        found.append(own)
    return found


def test_rows_of_copies_hold_each_continuation_behind_its_beginning():
    copies = copy_beginnings(pack_forks(ROWS, seq_len=T)).copies
    for b, own in enumerate(documents(ROWS)):
        assert copies.rows[b][copies.rows[b] < T].tolist() == list(chain(*own))
        assert np.unique(copies.starts[b][copies.rows[b] < T], return_counts=True)[1].tolist() == list(map(len, own))
    assert copies.places.shape == (2, 4, T)


@pytest.mark.parametrize("kernels", [False, repeat(True)])
def test_continuations_equal_documents_of_their_own_and_gradients_add_up(kernels, interpreted):
    forked, apart = copy_beginnings(pack_forks(ROWS, seq_len=T)), documents(ROWS)
    width = max(sum(map(len, own)) for own in apart)
    index = np.full((2, width), T)
    for b, own in enumerate(apart):
        index[b, : sum(map(len, own))] = list(chain(*own))
    plain, weight = pack_segments([list(map(len, own)) for own in apart], seq_len=width), jnp.full((96, 1, 4), 0.3)
    keys = jax.random.split(jax.random.key(0), 4)
    x, g = jax.random.normal(keys[0], (2, T, 96)), -jnp.exp(jax.random.normal(keys[1], (2, T, 2)))
    beta, cotangent = jax.nn.sigmoid(jax.random.normal(keys[2], (2, T, 2))), jax.random.normal(keys[3], (2, T, 2, V))

    def layer(segments, x, g, beta):
        return gated_delta_rule(causal_convolution(x, weight, segments), g, beta, segments, HEADS)

    def copied(*values):
        spread = [jnp.take_along_axis(jnp.pad(v, ((0, 0), (0, 1), (0, 0))), index[..., None], 1) for v in values]
        out, first = layer(plain, *spread), np.zeros((2, T), int)
        for b in range(2):
            for place in range(width - 1, -1, -1):
                if index[b, place] < T:
                    first[b, index[b, place]] = place
        real = (forked.segment_ids > 0)[..., None, None]
        return jnp.where(real, jnp.take_along_axis(out, first[..., None, None], 1), 0)

    rule = ChunkedDeltaRule()
    if kernels:
        from jaxglue.ops.delta_rule.triton import TritonDeltaRule

        rule = interpreted(TritonDeltaRule)(compute_capability=90, chunk=32)
    values = x, g, beta
    with DELTA_RULE.using(rule):
        got = outputs_and_gradients(lambda *values: layer(forked, *values), values, cotangent)
    expected = outputs_and_gradients(copied, values, cotangent)
    assert_close(got[:1], expected[:1], 1e-5)
    assert_close(got[1:], expected[1:], 1e-5)
