"""The gated convolution: its definition, its steps, and its kernels against the reference in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.ops.backend import compute_capability, tracing_for
from jaxglue.ops.recurrence import recur
from jaxglue.ops.segments import pack_segments
from jaxglue.ops.short_convolution import SHORT_CONVOLUTION, short_convolution
from tests.closeness import assert_close, outputs_and_gradients


def arguments(shape, C, W, dtype=jnp.float32):
    """Values, weight and bias."""
    keys = jax.random.split(jax.random.key(0), 3)
    values = jax.random.normal(keys[0], (*shape, 3 * C), dtype)
    return values, jax.random.normal(keys[1], (C, 1, W), dtype), jax.random.normal(keys[2], (C,), dtype)


def test_it_is_the_gated_sum_over_a_documents_last_tokens():
    lengths, T, C, W = [1, 2, 9, 3, 1], 20, 5, 3
    values, weight, bias = arguments((1, T), C, W)
    got = recur(short_convolution(weight, bias), pack_segments([lengths], seq_len=T), values)[0]
    before, gate, x = np.split(np.asarray(values[0], np.float64), 3, axis=1)
    taps, start = np.asarray(weight[:, 0], np.float64), 0
    for length in lengths:
        for t in range(start, start + length):
            tokens = range(max(start, t - W + 1), t + 1)
            total = sum(taps[:, W - 1 - (t - s)] * before[s] * x[s] for s in tokens) + np.asarray(bias)
            np.testing.assert_allclose(got[t], gate[t] * total, rtol=1e-5, atol=1e-6)
        start += length


@pytest.mark.parametrize("W", [3, repeat(1), repeat(7)])
def test_steps_give_what_whole_documents_give(W):
    values, weight, bias = arguments((1, 9), 4, W)
    convolution, segments = short_convolution(weight, bias), pack_segments([[9]], seq_len=9)
    whole = recur(convolution, segments, values)
    states, outputs = jnp.zeros((1, W - 1, 4)), []
    for token in range(9):
        y, states = convolution.step(states, values[:, token])
        outputs.append(y)
    np.testing.assert_allclose(jnp.stack(outputs, 1), whole, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(states, convolution.last(segments, values)[0][:1])


@pytest.mark.parametrize(("W", "biased", "trained"), [(3, True, True), repeat(7, False, True), repeat(4, True, False)])
def test_interpreted_kernels_equal_the_reference(W, biased, trained, interpreted):
    from jaxglue.ops.short_convolution.triton import TritonShortConvolution

    rows = [[1, W - 1, W, 2, W + 1, 1, 1], [4 * W + 5]]
    T, C = max(map(sum, rows)) + 2, 16
    segments, (values, weight, bias) = pack_segments(rows, seq_len=T), arguments((2, T), C, W)
    cotangent = jax.random.normal(jax.random.key(9), (2, T, C))
    given = (values, weight, bias)[: 1 if not trained else 2 + biased]

    def convolve(values, weight=weight, bias=bias):
        return recur(short_convolution(weight, bias if biased else None), segments, values)

    def compute(kernels):
        with SHORT_CONVOLUTION.using(kernels):
            return outputs_and_gradients(convolve, given, cotangent)

    kernels = interpreted(TritonShortConvolution)(compute_capability=90, tokens=8)
    assert_close(compute(kernels), compute(None), 1e-6)


@repeats_parts_of("test_saved_residuals_spare_a_forward_kernel")
@pytest.mark.parametrize("W", [3, repeat(7)])
def test_a_pass_is_one_kernel_on_a_gpu(W, h200):
    segments = pack_segments([[100, 300]], seq_len=512)
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200) for x in arguments((1, 512), 2048, W, jnp.bfloat16)[:2]
    ]

    def loss(values, weight):
        return jnp.sin(recur(short_convolution(weight), segments, values).astype(jnp.float32)).sum()

    with tracing_for((9, 0)):
        program = jax.jit(jax.value_and_grad(loss)).lower(*types).compile()
    assert program.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 2


@pytest.mark.parametrize(
    ("shapes", "message"),
    [(((4, 2, 3), 12), r"weight must be \[C, 1, W\]"), (((4, 1, 3), 8), r"values must be \[B, T")],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    weight, width = shapes
    with pytest.raises(ValueError, match=message):
        recur(short_convolution(jnp.ones(weight)), pack_segments([[5]], seq_len=5), jnp.ones((1, 5, width)))


@pytest.mark.gpu
@pytest.mark.parametrize("W", [3, 7])
def test_kernels_follow_float32_on_a_gpu(W):
    from jaxglue.ops.short_convolution.triton import TritonShortConvolution

    rows = [[1, W - 1, W, 700, W + 1, 2, 200], [1] * 64 + [900]]
    segments, (values, weight, bias) = pack_segments(rows, seq_len=1000), arguments((2, 1000), 2560, W, jnp.bfloat16)
    cotangent = jax.random.normal(jax.random.key(9), (2, 1000, 2560), jnp.bfloat16)

    def compute(kernels, *given):
        values, weight, bias, cotangent = given
        with SHORT_CONVOLUTION.using(kernels):
            convolve = lambda *given: recur(short_convolution(*given[1:]), segments, given[0])  # noqa: E731
            return outputs_and_gradients(convolve, (values, weight, bias), cotangent)

    half = values, weight, bias, cotangent
    got = compute(TritonShortConvolution.of(compute_capability()), *half)
    expected = compute(None, *(x.astype(jnp.float32) for x in half))
    assert_close(got, expected, 6e-3)
