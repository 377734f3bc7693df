"""States behind documents, and steps from them: a document equals its beginning and steps for the rest."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.backend import tracing_for
from jaxglue.ops.delta_rule import (
    CONVOLUTION_STEP,
    DELTA_RULE,
    DELTA_STEP,
    DeltaHeads,
    advance_rows,
    advance_states,
    causal_convolution,
    convolution_step,
    convolve_rows,
    delta_rule_and_states,
    last_inputs,
    make_states,
    reference_delta_rule,
)
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.delta_rule.states import delta_step
from jaxglue.ops.segments import pack_segments

HEADS, V, T = DeltaHeads(1, 2, 16), 32, 110
LENGTHS, MORE = [1, 33, 2, 64, 4], 3


def states_by_token(qkv, g, beta, lengths):
    """The reference's state behind each document, by steps from empty ones."""
    starts, states, step = np.cumsum([0, *lengths[:-1]]), [], jax.jit(delta_step, static_argnums=4)
    for start, length in zip(starts, lengths, strict=True):
        state = jnp.zeros((1, HEADS.values, HEADS.key_dim, V))
        for t in range(start, start + length):
            _, state = step(qkv[:, t], g[:, t], beta[:, t], state, HEADS)
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
    slot = jnp.array([1])

    @jax.jit
    def begin():
        expected = causal_convolution(qkv, weight, whole)
        rule = reference_delta_rule(*HEADS.split(expected), g, beta, whole)
        begun = causal_convolution(qkv, weight, first)
        state = delta_rule_and_states(begun, g, beta, first, HEADS)[1][0, :1]
        stored = make_states(3, HEADS, V, 4, jnp.float32)
        return expected, rule, stored.write(slot, states=state, inputs=last_inputs(qkv, first, 3)[0, :1])

    @jax.jit
    def step(stored, qkv, g, beta):
        mixed, inputs = convolution_step(qkv, stored.inputs[slot], weight)
        out, states = advance_states(stored.states, slot, jnp.array([True]), mixed, g, beta, HEADS)
        return mixed, out, replace(stored.write(slot, inputs=inputs), states=states)

    expected, rule, stored = begin()
    for t in range(length, length + MORE):
        mixed, out, stored = step(stored, *(x[:, t] for x in (qkv, g, beta)))
        np.testing.assert_allclose(mixed, expected[:, t], atol=1e-5)
        np.testing.assert_allclose(out, rule[:, t], atol=1e-5)
    assert not np.any(stored.states[::2])


def test_interpreted_step_equals_the_reference(interpreted):
    from jaxglue.ops.delta_rule.triton import TritonDeltaStep

    (qkv, g, beta), states = arguments(), jax.random.normal(jax.random.key(1), (7, 2, 16, V))
    slots, begun = jnp.array([4, 0, 6]), jnp.array([True, False, True])

    def compute(kernel):
        with DELTA_STEP.using(kernel):
            return jax.jit(lambda *token: advance_states(states, slots, begun, *token, HEADS))(
                *(x[0, :3] for x in (qkv, g, beta))
            )

    got, expected = compute(interpreted(TritonDeltaStep)(compute_capability=90)), compute(None)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_array_equal(got[1][jnp.array([1, 2, 3, 5])], states[jnp.array([1, 2, 3, 5])])


@pytest.mark.parametrize("kernel", [False, True])
def test_rows_of_several_tokens_are_those_of_single_steps(kernel, interpreted):
    from jaxglue.ops.delta_rule.triton import TritonDeltaStep

    values, states = arguments(), jax.random.normal(jax.random.key(1), (7, 2, 16, V))
    slots, begun, counts = jnp.array([4, 0, 6]), jnp.array([True, False, True]), jnp.array([2, 3, 0])
    kept, tokens = (tuple(x[0, start : start + 9].reshape(3, 3, -1) for x in values) for start in (0, 9))
    with DELTA_STEP.using(interpreted(TritonDeltaStep)(compute_capability=90) if kernel else None):
        out, after = jax.jit(lambda *arrays: advance_rows(states, slots, begun, *arrays, HEADS))(kept, counts, tokens)
    with DELTA_STEP.using(None):
        for sequence, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            begins, own = begun[sequence : sequence + 1], states
            single = jnp.array([slot])
            for row in range(count):
                _, own = advance_states(own, single, begins, *(x[sequence, row][None] for x in kept), HEADS)
                begins = jnp.array([True])
            before = jnp.where(begins[:, None, None], own[slot], 0)
            np.testing.assert_allclose(after[slot], before, atol=1e-5)
            for row in range(3):
                expected, own = advance_states(own, single, begins, *(x[sequence, row][None] for x in tokens), HEADS)
                begins = jnp.array([True])
                np.testing.assert_allclose(out[sequence, row], expected[0], atol=1e-5)
    np.testing.assert_array_equal(after[jnp.array([1, 2, 3, 5])], states[jnp.array([1, 2, 3, 5])])


def test_last_inputs_are_a_documents_own():
    x = jnp.arange(1.0, T + 1)[None, :, None]
    got = last_inputs(x, pack_segments([LENGTHS], seq_len=T), 3)[0, :, :, 0]
    np.testing.assert_array_equal(got[:3], [[0, 0, 1], [32, 33, 34], [0, 35, 36]])


def test_step_writes_in_place_on_a_gpu(h200):
    heads, slots, S = DeltaHeads(2, 4, 128), 65, 64
    shaped = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=h200)  # noqa: E731
    token = shaped((S, 1024), jnp.bfloat16), shaped((S, 4), jnp.float32), shaped((S, 4), jnp.bfloat16)
    states = shaped((slots, 4, 128, 128), jnp.float32)
    with tracing_for((9, 0)):
        step = jax.jit(lambda *values: advance_states(*values, heads), donate_argnums=0)
        program = step.lower(states, shaped((S,), jnp.int32), shaped((S,), bool), *token).compile()
        rows = jax.jit(lambda *values: advance_rows(*values, heads), donate_argnums=0)
        several = tuple(shaped((S, 3, *x.shape[1:]), x.dtype) for x in token)
        arguments = shaped((S,), bool), several, shaped((S,), jnp.int32), several
        drafted = rows.lower(states, shaped((S,), jnp.int32), *arguments).compile()
        convolve = jax.jit(lambda *values: convolve_rows(*values), donate_argnums=0)
        places = shaped((S,), jnp.int32), shaped((S,), bool)
        values = shaped((S, 1, 1024), jnp.bfloat16), shaped((1024, 1, 4), jnp.bfloat16)
        convolved = convolve.lower(shaped((slots, 3, 1024), jnp.bfloat16), *places, *values).compile()
    for each in (program, drafted, convolved):
        assert each.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
        assert each.memory_analysis().temp_size_in_bytes < slots * 4 * 128 * 128


@pytest.mark.parametrize(
    ("kept", "rows"),
    [(None, 1), (2, 0), (4, 3), repeat(None, 3), repeat(2, 1), repeat(2, 3), repeat(4, 0), repeat(4, 1)],
)
def test_convolution_of_rows_is_that_of_whole_documents(kept, rows, interpreted):
    """By the kernel and without: outputs, last inputs behind the kept tokens that count, and other slots' as before."""
    from jaxglue.ops.delta_rule.triton import TritonConvolutionStep

    C, W, slots, begun = 700, 4, jnp.array([4, 0, 6]), jnp.array([True, False, True])
    keys = jax.random.split(jax.random.key(0), 5)
    inputs, weight = jax.random.normal(keys[0], (7, W - 1, C)), jax.random.normal(keys[1], (C, 1, W))
    x, bias = jax.random.normal(keys[2], (3, rows, C)), jax.random.normal(keys[3], (C,))
    counts = None if kept is None else jnp.array([kept, 0, 1])
    before = None if kept is None else jax.random.normal(keys[4], (3, kept, C))
    arrays = inputs, slots, begun, x, weight, bias
    with CONVOLUTION_STEP.using(None):
        expected, after = convolve_rows(*arrays, kept=before, counts=counts)
    for sequence, slot in enumerate(slots.tolist()):
        old = inputs[slot] if begun[sequence] else jnp.zeros_like(inputs[slot])
        own = [] if before is None else before[sequence, : int(counts[sequence])]
        document = jnp.concatenate([old, *([own] if len(own) else []), x[sequence]])
        segments = pack_segments([[len(document)]], seq_len=len(document))
        y = causal_convolution(document[None], weight, segments, bias=bias)[0]
        np.testing.assert_allclose(expected[sequence], y[len(document) - rows :], atol=1e-5)
        ends = len(document) - (rows if kept is not None else 0)
        np.testing.assert_array_equal(after[slot], document[ends - W + 1 : ends])
    with CONVOLUTION_STEP.using(interpreted(TritonConvolutionStep)(compute_capability=90)):
        got = jax.jit(lambda *arrays: convolve_rows(*arrays, kept=before, counts=counts))(*arrays)
    np.testing.assert_allclose(got[0], expected, atol=1e-5)
    np.testing.assert_array_equal(got[1], after)
