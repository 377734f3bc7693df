"""States behind documents, and steps from them: a document equals its beginning and steps for the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.delta_rule import (
    DELTA_RULE,
    DeltaHeads,
    causal_convolution,
    convolution_step,
    delta_rule_and_states,
    delta_step,
    last_inputs,
    make_states,
    reference_delta_rule,
)
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.segments import pack_segments

HEADS, V, T = DeltaHeads(1, 2, 16), 32, 110
LENGTHS, MORE = [1, 33, 2, 64, 4], 3


def states_by_token(qkv, g, beta, lengths):
    """The reference's state behind each document, by steps from empty ones."""
    starts, states = np.cumsum([0, *lengths[:-1]]), []
    for start, length in zip(starts, lengths, strict=True):
        state = jnp.zeros((1, HEADS.values, HEADS.key_dim, V))
        for t in range(start, start + length):
            _, state = delta_step(qkv[:, t], g[:, t], beta[:, t], state, HEADS)
        states.append(state[0])
    return jnp.stack(states)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = jax.random.normal(keys[0], (1, T, 2 * 16 + 2 * V))
    g = -jnp.exp(jax.random.uniform(keys[1], (1, T, 2), minval=-7.0, maxval=1.0))
    return qkv, g, jax.nn.sigmoid(jax.random.normal(keys[2], g.shape))


@pytest.mark.parametrize("kernels", [False, True], ids=["chunked", "kernels"])
def test_states_behind_packed_documents_are_those_of_steps(kernels, interpreted):
    from jaxglue.ops.delta_rule.triton import TritonDeltaRule

    values, segments = arguments(), pack_segments([LENGTHS], seq_len=T)
    rule = interpreted(TritonDeltaRule)(compute_capability=90, chunk=32) if kernels else ChunkedDeltaRule(chunk=32)
    with DELTA_RULE.using(rule):
        out, states = jax.jit(lambda *values: delta_rule_and_states(*values, segments, HEADS))(*values)
    np.testing.assert_allclose(states[0, : len(LENGTHS)], states_by_token(*values, LENGTHS), atol=1e-5)
    qkv, g, beta = values
    np.testing.assert_allclose(out, reference_delta_rule(*HEADS.split(qkv), g, beta, segments), atol=1e-5)


def test_steps_continue_a_document():
    """The convolution and the rule of a document's last tokens, from what remains of its first ones."""
    (qkv, g, beta), length = arguments(), 40
    weight = jax.random.normal(jax.random.key(5), (qkv.shape[-1], 1, 4))
    whole, first = (pack_segments([[n]], seq_len=T) for n in (length + MORE, length))
    expected = causal_convolution(qkv, weight, whole)
    rule = reference_delta_rule(*HEADS.split(expected), g, beta, whole)
    begun = causal_convolution(qkv, weight, first)
    stored = make_states(3, HEADS, V, 4, jnp.float32)
    slot = jnp.array([1])
    state = delta_rule_and_states(begun, g, beta, first, HEADS)[1][0, :1]
    stored = stored.write(slot, states=state, inputs=last_inputs(qkv, first, 3)[0, :1])
    for t in range(length, length + MORE):
        before = stored.read(slot, jnp.array([True]))
        mixed, inputs = convolution_step(qkv[:, t], before.inputs, weight)
        out, states = delta_step(mixed, g[:, t], beta[:, t], before.states, HEADS)
        stored = stored.write(slot, states=states, inputs=inputs)
        np.testing.assert_allclose(mixed, expected[:, t], atol=1e-5)
        np.testing.assert_allclose(out, rule[:, t], atol=1e-5)
    assert not np.any(stored.states[::2]) and not np.any(stored.read(slot, jnp.array([False])).states)


def test_last_inputs_are_a_documents_own():
    x = jnp.arange(1.0, T + 1)[None, :, None]
    got = last_inputs(x, pack_segments([LENGTHS], seq_len=T), 3)[0, :, :, 0]
    np.testing.assert_array_equal(got[:3], [[0, 0, 1], [32, 33, 34], [0, 35, 36]])
