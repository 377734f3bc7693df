"""Mamba-2 by chunks and kernels against the scan in float32, and a document against its neighbors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats, repeats_parts_of

from jaxglue.ops.backend import compute_capability, tracing_for
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.recurrence import recur
from jaxglue.ops.segments import pack_segments
from jaxglue.ops.state_space import (
    GATED_NORM,
    STATE_SPACE,
    STATE_STEP,
    Mamba2Weights,
    StateHeads,
    advance_states,
    gated_group_norm,
    mamba2,
    reference_state_space,
    state_space,
    state_space_and_states,
)
from jaxglue.ops.state_space.chunks import ChunkedStateSpace
from tests.closeness import assert_close, outputs_and_gradients

HEADS = StateHeads(4, 16, 2, 32)
ROWS = {
    "uneven": [[5, 1, 1, 23, 90, 2, 17, 1], [1, 15, 16, 32, 64]],
    "one token each": [[1] * 70],
    "boundaries at chunks": [[32, 64, 32]],
    "around chunk and convolution": [[31, 33, 3, 5, 65, 63, 4]],
}


def arguments(B, T, heads=HEADS, dtype=jnp.float32):
    """xbc, Δ, decays from 1 to e⁻³, D."""
    keys = jax.random.split(jax.random.key(0), 4)
    xbc = jax.random.normal(keys[0], (B, T, heads.width), dtype)
    g = -jnp.exp(jax.random.uniform(keys[1], (B, T, heads.values), minval=-7.0, maxval=1.0))
    step = jnp.exp(jax.random.uniform(keys[2], g.shape, minval=-5.0, maxval=0.0))
    return xbc, step, g, jax.random.normal(keys[3], (heads.values,))


def compute(rule, values, segments, heads=HEADS):
    with STATE_SPACE.using(rule):
        call = lambda *values: state_space(*values, segments, heads)  # noqa: E731
        return outputs_and_gradients(call, values, cotangents(values, heads))


def cotangents(values, heads):
    """The same numbers in any dtype."""
    drawn = jax.random.normal(jax.random.key(9), (*values[1].shape, heads.value_dim), jnp.bfloat16)
    return drawn.astype(values[0].dtype)


def interpreted_rule(interpreted):
    from jaxglue.ops.state_space.triton import StateSpaceTiles, TritonStateSpace

    tile = StateSpaceTiles(columns=8, heads=1)
    return interpreted(TritonStateSpace)(compute_capability=90, state=tile, output=tile, input_gradient=tile, chunk=32)


@pytest.fixture(params=["chunked", "kernels"])
def rule(request, interpreted):
    """A rule of chunks of 32 tokens."""
    return ChunkedStateSpace(chunk=32, group=2) if request.param == "chunked" else interpreted_rule(interpreted)


@pytest.mark.parametrize(
    "case", repeats(ROWS, "one token each", "boundaries at chunks", "around chunk and convolution")
)
def test_chunks_equal_the_scan(case, rule):
    rows = ROWS[case]
    T = max(map(sum, rows)) + 3
    segments, values = pack_segments(rows, seq_len=T), arguments(len(rows), T)

    def scan(*values):
        return reference_state_space(*values, segments, HEADS)

    expected = outputs_and_gradients(scan, values, cotangents(values, HEADS))
    got = compute(rule, values, segments)
    assert_close(got, expected, 1e-5)
    padding = segments.segment_ids == 0
    assert not any(np.any(x[padding]) for x in got[:4])


@repeats_parts_of("test_states_behind_packed_documents_are_those_of_steps")
def test_no_bit_depends_on_a_neighbor(rule):
    """Outputs and gradients of two documents, each in chunks of others whose values change."""
    rows, own = [[20, 30, 7, 40]], np.r_[20:50, 57:97]
    segments, values = pack_segments(rows, seq_len=97), arguments(1, 97)
    others = np.setdiff1d(np.arange(97), own)
    changed = [x.at[:, others].multiply(1.7) if x.ndim > 1 else x for x in values]
    before, after = (compute(rule, tuple(each), segments)[:4] for each in (values, changed))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, own], b[:, own])
        assert np.any(a[:, others] != b[:, others])


def test_states_behind_packed_documents_are_those_of_steps(rule):
    lengths, T = [1, 33, 2, 64, 4], 110
    values, segments = arguments(1, T), pack_segments([lengths], seq_len=T)
    with STATE_SPACE.using(rule):
        out, states = jax.jit(lambda *values: state_space_and_states(*values, segments, HEADS))(*values)
    expected, last = jnp.zeros((len(lengths), 4, 32, 16)), np.cumsum(lengths)
    xbc, step, g, skip = values
    advance = jax.jit(partial(advance_states, heads=HEADS))
    for document, (start, end) in enumerate(zip(last - lengths, last, strict=True)):
        for t in range(start, end):
            slot, begun = jnp.array([document]), jnp.array([t > start])
            token = (x[0, t : t + 1] for x in (xbc, step, g))
            y, expected = advance(expected, slot, begun, *token, skip)
            np.testing.assert_allclose(out[0, t], y[0], atol=2e-5)
    np.testing.assert_allclose(states[0, : len(lengths)], expected, atol=1e-5)


def test_interpreted_step_equals_the_reference(interpreted):
    from jaxglue.ops.state_space.triton import TritonStateStep

    xbc, step, g, skip = arguments(1, 3)
    states = jax.random.normal(jax.random.key(1), (7, 4, 32, 16))
    slots, begun = jnp.array([4, 0, 6]), jnp.array([True, False, True])

    def advance(kernel):
        with STATE_STEP.using(kernel):
            call = jax.jit(lambda *token: advance_states(states, slots, begun, *token, skip, HEADS))
            return call(xbc[0], step[0], g[0])

    got, expected = advance(interpreted(TritonStateStep)(compute_capability=90)), advance(None)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_array_equal(got[1][jnp.array([1, 2, 3, 5])], states[jnp.array([1, 2, 3, 5])])


def test_interpreted_gated_norm_equals_the_reference(interpreted):
    from jaxglue.ops.state_space.triton import TritonGatedNorm

    x, gate, cotangent = jax.random.normal(jax.random.key(0), (3, 2, 35, 72))
    weight = jnp.linspace(0.5, 2.0, 72)

    def norm(kernels):
        with GATED_NORM.using(kernels):
            call = lambda *values: gated_group_norm(*values, 1e-6, groups=3)  # noqa: E731
            return outputs_and_gradients(call, (x, gate, weight), cotangent)

    assert_close(norm(interpreted(TritonGatedNorm)(compute_capability=90)), norm(None), 1e-6)


def weights(heads=HEADS, taps=4):
    keys = jax.random.split(jax.random.key(3), 5)
    shapes = (heads.width, 1, taps), (heads.width,), *((heads.values,),) * 3
    values = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return Mamba2Weights(**dict(zip(("convolution", "bias", "A_log", "dt_bias", "skip"), values, strict=True)))


def test_steps_continue_a_document():
    """Convolution and recurrence of a document's last tokens, from what remains of its first ones."""
    recurrence, T = mamba2(weights(), HEADS, (0.0, float("inf"))), 12
    xbc = jax.random.normal(jax.random.key(0), (1, T, HEADS.width))
    dt = jax.random.normal(jax.random.key(1), (1, T, HEADS.values))
    whole, last, step = (jax.jit(part) for part in (partial(recur, recurrence), recurrence.last, recurrence.step))
    expected = whole(pack_segments([[T]], seq_len=T), xbc, dt)
    for length in (1, 2, 3, 7):
        first = pack_segments([[length]], seq_len=T)
        states = jax.tree.map(lambda x: x[0, :1], last(first, xbc, dt))
        for t in range(length, T):
            out, states = step(states, xbc[:, t], dt[:, t])
            np.testing.assert_allclose(out, expected[:, t], rtol=1e-5, atol=2e-5)


def test_step_sizes_stay_within_limits():
    from jaxglue.ops.state_space import step_sizes

    got = step_sizes(jnp.array([-20.0, 0.0, 20.0]), jnp.zeros(3), (0.001, 0.1))
    np.testing.assert_allclose(got, [0.001, 0.1, 0.1])


@repeats_parts_of("test_saved_residuals_spare_a_forward_kernel")
@pytest.mark.parametrize(("saved", "count"), [(True, 12), repeat(False, 13)])
def test_saved_outputs_spare_a_kernel_on_a_gpu(saved, count, h200):
    """Both passes read decays and states, which are computed again, as is the convolution."""
    heads, T = StateHeads(16, 64, 1, 128), 512
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=h200)  # noqa: E731
    segments, parameters = pack_segments([[100, 300]], seq_len=T), weights(heads)
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(ATTENTION_OUT) if saved else policies.nothing_saveable

    def loss(xbc, dt):
        recurrence = mamba2(parameters, heads, (0.0, float("inf")))
        layer = lambda *values: jnp.sin(recur(recurrence, segments, *values).astype(jnp.float32))  # noqa: E731
        return jax.checkpoint(layer, policy=policy)(xbc, dt).sum()

    with tracing_for((9, 0)):
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(spec(1, T, heads.width), spec(1, T, 16)).compile()
    assert program.as_text().count('custom_call_target="triton_kernel_call_ffi"') == count


def relative_errors(got, expected):
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, expected, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [StateHeads(16, 64, 1, 128), StateHeads(16, 64, 2, 128), StateHeads(4, 128, 1, 256)])
def test_kernels_follow_float32_on_a_gpu(heads):
    """And give the same bits again."""
    from jaxglue.ops.state_space.triton import TritonStateSpace

    rows = [[700, 1, 64, 200], [1, 2, 1000]]
    segments, half = pack_segments(rows, seq_len=1024), arguments(2, 1024, heads, jnp.bfloat16)
    exact = tuple(x.astype(jnp.float32) for x in half)
    kernels = TritonStateSpace.of(compute_capability())
    got, again = (compute(kernels, half, segments, heads) for _ in range(2))
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert max(relative_errors(got, compute(ChunkedStateSpace(), exact, segments, heads))) < 6e-3


@pytest.mark.gpu
def test_steps_and_norms_follow_float32_on_a_gpu():
    from jaxglue.ops.state_space.triton import TritonGatedNorm, TritonStateStep

    heads = StateHeads(16, 64, 2, 128)
    xbc, step, g, skip = arguments(1, 3, heads, jnp.bfloat16)
    slots, begun = jnp.array([5, 0, 2]), jnp.array([True, True, False])
    states, weight = jax.random.normal(jax.random.key(1), (6, 16, 128, 64)), jnp.linspace(0.5, 2.0, 1024)
    x, gate = jax.random.normal(jax.random.key(2), (2, 64, 1024), jnp.bfloat16)

    def values(kernel, norm, dtype):
        with STATE_STEP.using(kernel), GATED_NORM.using(norm):
            out, after = advance_states(states, slots, begun, xbc[0].astype(dtype), step[0], g[0], skip, heads)
            call = lambda x, gate: gated_group_norm(x, gate, weight, 1e-5, groups=2)  # noqa: E731
            normed = outputs_and_gradients(call, (x.astype(dtype), gate.astype(dtype)), x.astype(dtype))
            return [np.asarray(y, np.float32) for y in (out, after, *normed)]

    kernels = TritonStateStep.of(compute_capability()), TritonGatedNorm.of(compute_capability())
    assert max(relative_errors(values(*kernels, jnp.bfloat16), values(None, None, jnp.float32))) < 6e-3
