"""The delta rule's kernels, and those around it, against the reference in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats, repeats_parts_of

from jaxglue.ops.backend import compute_capability, tracing_for
from jaxglue.ops.delta_rule import (
    CONVOLUTION_STEP,
    DELTA_ROWS,
    DELTA_RULE,
    DELTA_STEP,
    DeltaHeads,
    advance_rows,
    advance_states,
    causal_convolution,
    convolve_rows,
    delta_rule_and_states,
    gated_delta_rule,
    gated_rms_norm,
    reference_delta_rule,
)
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.segments import pack_segments
from tests.closeness import assert_close, outputs_and_gradients

HEADS, V = DeltaHeads(1, 2, 16), 32
ROWS = {
    "uneven": [[5, 1, 1, 23, 90, 2, 17, 1], [1, 15, 16, 32, 64]],
    "one token each": [[1] * 70],
    "boundaries at chunks": [[32, 64, 32]],
}


def arguments(B, T, heads, V, dtype=jnp.float32):
    """qkv, g, β with decays from 1 to e⁻³."""
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = 2 * jax.random.normal(keys[0], (B, T, 2 * heads.keys * heads.key_dim + heads.values * V), dtype)
    g = -jnp.exp(jax.random.uniform(keys[1], (B, T, heads.values), minval=-7.0, maxval=1.0))
    return qkv, g, jax.nn.sigmoid(jax.random.normal(keys[2], g.shape))


@pytest.mark.parametrize("case", repeats(ROWS, "one token each", "boundaries at chunks"))
def test_interpreted_kernels_equal_the_scan(case, interpreted):
    from jaxglue.ops.delta_rule.triton import DeltaKernelTiles, DeltaTiles, TritonDeltaRule

    rows = ROWS[case]
    T = max(map(sum, rows)) + 3
    segments, values = pack_segments(rows, seq_len=T), arguments(len(rows), T, HEADS, V)
    tile = DeltaKernelTiles(columns=16)
    tiles = DeltaTiles(state=tile, output=tile, state_gradient=tile, gradient=tile)
    backend = interpreted(TritonDeltaRule)(compute_capability=90, tiles=tiles, chunk=32)
    cotangent = jax.random.normal(jax.random.key(9), (len(rows), T, HEADS.values, V))

    def kernels(qkv, g, beta):
        with DELTA_RULE.using(backend):
            return gated_delta_rule(qkv, g, beta, segments, HEADS)

    def scan(qkv, g, beta):
        return reference_delta_rule(*HEADS.split(qkv), g, beta, segments)

    got = outputs_and_gradients(kernels, values, cotangent)
    expected = outputs_and_gradients(scan, values, cotangent)
    assert_close(got[:1], expected[:1], 1e-5)
    assert_close(got[1:], expected[1:], 1e-5)
    padding = segments.segment_ids == 0
    assert not any(np.any(x[padding]) for x in got)


@pytest.mark.parametrize("trained", [repeat(False), True])
def test_interpreted_convolution_equals_the_reference(trained, interpreted):
    from jaxglue.ops.delta_rule.triton import TritonDeltaRows

    rows = [[1, 2, 9, 3, 1, 1, 2], [21]]
    segments, C = pack_segments(rows, seq_len=22), 16
    x, weight = jax.random.normal(jax.random.key(0), (2, 22, C)), jax.random.normal(jax.random.key(1), (C, 1, 4))
    cotangent = jax.random.normal(jax.random.key(2), x.shape)
    arguments = (x, weight) if trained else (x,)

    def compute(kernels):
        with DELTA_ROWS.using(kernels):
            convolve = lambda x, weight=weight: causal_convolution(x, weight, segments)  # noqa: E731
            return outputs_and_gradients(convolve, arguments, cotangent)

    assert_close(compute(interpreted(TritonDeltaRows)(compute_capability=90, tokens=8)), compute(None), 1e-6)


def test_interpreted_gated_norm_equals_the_reference(interpreted):
    from jaxglue.ops.delta_rule.triton import TritonDeltaRows

    x, gate, cotangent = jax.random.normal(jax.random.key(0), (3, 2, 35, 3, 24))
    weight = jnp.linspace(0.5, 2.0, 24)

    def compute(kernels):
        with DELTA_ROWS.using(kernels):
            norm = lambda *values: gated_rms_norm(*values, 1e-6)  # noqa: E731
            return outputs_and_gradients(norm, (x, gate, weight), cotangent)

    assert_close(compute(interpreted(TritonDeltaRows)(compute_capability=90)), compute(None), 1e-6)


@repeats_parts_of("test_saved_residuals_spare_a_forward_kernel")
@pytest.mark.parametrize(("saved", "count"), [(True, 7), repeat(False, 8)])
def test_saved_outputs_spare_a_kernel_on_a_gpu(saved, count, h200):
    """Both passes read inverses and states, which are computed again."""
    heads, T = DeltaHeads(2, 4, 128), 512
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200) for x in arguments(1, T, heads, 128, jnp.bfloat16)]
    segments = pack_segments([[100, 300]], seq_len=T)
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(ATTENTION_OUT) if saved else policies.nothing_saveable

    def loss(qkv, g, beta):
        rule = lambda *values: jnp.sin(gated_delta_rule(*values, segments, heads).astype(jnp.float32))  # noqa: E731
        return jax.checkpoint(rule, policy=policy)(qkv, g, beta).sum()

    with tracing_for((9, 0)):
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*types).compile()
    assert program.as_text().count('custom_call_target="triton_kernel_call_ffi"') == count


def relative_errors(got, expected):
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, expected, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[[700, 1, 64, 200], [1, 2, 1000]], [[1] * 1024]])
def test_kernels_follow_float32_on_a_gpu(rows):
    """On any GPU, also those on which `auto` does not take them."""
    from jaxglue.ops.delta_rule.triton import TritonDeltaRule

    heads, T = DeltaHeads(4, 8, 128), 1024
    segments, half = pack_segments(rows, seq_len=T), arguments(len(rows), T, heads, 128, jnp.bfloat16)
    exact = tuple(x.astype(jnp.float32) for x in half)
    cotangent = jax.random.normal(jax.random.key(9), (len(rows), T, heads.values, 128), jnp.bfloat16)

    def compute(rule, values, cotangent):
        with DELTA_RULE.using(rule):
            call = lambda *values: gated_delta_rule(*values, segments, heads)  # noqa: E731
            return outputs_and_gradients(call, values, cotangent)

    kernels = TritonDeltaRule.of(compute_capability())
    got = compute(kernels, half, cotangent)
    expected = compute(ChunkedDeltaRule(), exact, cotangent.astype(jnp.float32))
    long = max(map(max, rows)) > 1  # documents of one token have no decay
    assert max(relative_errors(got[: None if long else 2], expected[: None if long else 2])) < 6e-3


@pytest.mark.gpu
def test_convolution_and_gated_norm_follow_float32_on_a_gpu():
    from jaxglue.ops.delta_rule.triton import TritonDeltaRows

    kernels, segments = TritonDeltaRows.of(compute_capability()), pack_segments([[1, 700, 3, 200]], seq_len=1024)
    x = jax.random.normal(jax.random.key(0), (1, 1024, 2048), jnp.bfloat16)
    taps, weight = jax.random.normal(jax.random.key(1), (2048, 1, 4)), jnp.linspace(0.5, 2.0, 128)

    def compute(kernels, x):
        with DELTA_ROWS.using(kernels):
            convolve = lambda x: causal_convolution(x, taps, segments)  # noqa: E731
            heads = x.reshape(-1, 128)
            norm = lambda x, gate: gated_rms_norm(x, gate, weight, 1e-6)  # noqa: E731
            return outputs_and_gradients(convolve, (x,), x) + outputs_and_gradients(norm, (heads, heads[::-1]), heads)

    assert max(relative_errors(compute(kernels, x), compute(None, x.astype(jnp.float32)))) < 6e-3


@pytest.mark.gpu
def test_states_and_steps_follow_float32_on_a_gpu():
    from jaxglue.ops.delta_rule.triton import TritonDeltaRule, TritonDeltaStep

    heads, segments = DeltaHeads(4, 8, 128), pack_segments([[100, 1, 300]], seq_len=512)
    half = arguments(1, 512, heads, 128, jnp.bfloat16)
    slots, begun = jnp.array([5, 0, 2]), jnp.array([True, True, False])

    def compute(rule, step, values):
        with DELTA_RULE.using(rule), DELTA_STEP.using(step):
            _, states = delta_rule_and_states(*values, segments, heads)
            stored = jnp.ones((6, *states.shape[2:])).at[slots].set(states[0, :3])
            out, after = advance_states(stored, slots, begun, *(x[0, :3] for x in values), heads)
            return [np.asarray(x, np.float32) for x in (states[0, :3], out, after)]

    kernels = TritonDeltaRule.of(compute_capability()), TritonDeltaStep.of(compute_capability())
    exact = tuple(x.astype(jnp.float32) for x in half)
    assert max(relative_errors(compute(*kernels, half), compute(ChunkedDeltaRule(), None, exact))) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("kept", "rows"), [(2, 2), (1, 3), (3, 0)])
def test_rows_of_several_tokens_follow_float32_on_a_gpu(kept, rows):
    from jaxglue.ops.delta_rule.triton import TritonConvolutionStep, TritonDeltaStep

    heads, S = DeltaHeads(4, 8, 128), 5
    half = arguments(1, 64, heads, 128, jnp.bfloat16)
    parts = [tuple(x[0, at : at + S * n].reshape(S, n, x.shape[2]) for x in half) for at, n in ((0, kept), (32, rows))]
    slots, begun, counts = jnp.array([5, 0, 2, 7, 1]), jnp.array([1, 1, 0, 1, 1]) > 0, jnp.arange(S) % (kept + 1)
    states, C = jax.random.normal(jax.random.key(1), (9, 8, 128, 128)), half[0].shape[2]
    inputs = jax.random.normal(jax.random.key(2), (9, 3, C), jnp.bfloat16)
    taps = jax.random.normal(jax.random.key(3), (C, 1, 4), jnp.bfloat16)

    def compute(step, convolution, dtype):
        own = [tuple(x.astype(dtype) if index != 1 else x for index, x in enumerate(part)) for part in parts]
        with DELTA_STEP.using(step), CONVOLUTION_STEP.using(convolution):
            out, after = advance_rows(states, slots, begun, own[0], counts, own[1], heads)
            at = inputs.astype(dtype), slots, begun, own[1][0], taps.astype(dtype)
            y, last = convolve_rows(*at, kept=own[0][0], counts=counts)
        return [np.asarray(x, np.float32) for x in (after, last, out, y)[: 4 if rows else 2]]

    kernels = (kind.of(compute_capability()) for kind in (TritonDeltaStep, TritonConvolutionStep))
    assert max(relative_errors(compute(*kernels, jnp.bfloat16), compute(None, None, jnp.float32))) < 6e-3
