"""The head multiplies the tokens that count towards the loss alone, where rows have a bound of them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxglue.data.batch import Batch, row_of_documents, target_room
from jaxglue.engine.head_values import HeadValues

T, WIDTH, VOCABULARY = 512, 8, 97


@pytest.fixture
def batch():
    """Two rows, of which the first has more targets."""
    rng = np.random.default_rng(0)

    def row(counted):
        documents = [(rng.integers(0, VOCABULARY, n).astype(np.int32), rng.random(n) < counted) for n in (150, 200)]
        return row_of_documents(documents, seq_len=T, max_segments=4)

    return jax.tree.map(lambda *rows: jnp.concatenate(rows), row(0.4), row(0.1))


def head(batch: Batch):
    """Return the batch's cross-entropy, its gradient to hidden states, and the tokens whose logits were computed."""
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2 * T, WIDTH)), jnp.float32)
    output = SimpleNamespace(weight=jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32))

    def loss(hidden):
        return HeadValues(hidden, output, batch, softcap=None).cross_entropy

    largest = max(eqn.size for eqn in _shapes(jax.make_jaxpr(loss)(hidden).jaxpr))
    return *jax.value_and_grad(loss)(hidden), largest // VOCABULARY


def _shapes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (var.aval for var in eqn.outvars)
        for part in jaxprs_in_params(eqn.params):
            yield from _shapes(part)


def test_a_bound_of_targets_changes_no_value(batch):
    room = target_room(int(batch.loss_weights.sum(1).max()), T)
    assert room is not None and batch.loss_weights.sum(1).max() <= room < T // 2
    loss, gradient, tokens = head(batch)
    counted_loss, counted_gradient, counted = head(replace(batch, room=room))
    assert tokens >= 2 * T and counted < T + 1
    np.testing.assert_allclose(counted_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(counted_gradient, gradient, atol=1e-6)


def test_targets_beyond_the_bound_are_not_left_out_in_silence(batch):
    few = int(batch.loss_weights.sum()) // 2 - 1
    assert np.isnan(head(replace(batch, room=few))[0])


def test_rooms_are_few_and_hold_their_targets():
    rooms = {most: target_room(most, 4096) for most in range(1, 4097)}
    assert all(room is None or most <= room < 4096 for most, room in rooms.items())
    assert len(set(rooms.values())) == 15 and rooms[3585] is None
    assert {target_room(most, 512) for most in range(1, 513)} == {128, 256, 384, None}
