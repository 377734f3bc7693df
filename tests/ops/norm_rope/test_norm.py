"""Norm of a residual stream: outputs and gradients of the kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.backend import tracing_for
from jaxglue.ops.norm_rope import (
    LAYER_NORM,
    LLAMA_NORM,
    NORM_ROPE,
    NormStyle,
    fp8_stream_norm,
    norm,
    rms_norm,
    stream_norm,
)
from jaxglue.ops.norm_rope.reference import inverse_rms
from jaxglue.ops.quant.fp8 import quantize_rows

EPS = 1e-3
GEMMA = NormStyle(offset=1.0, rounds_first=False)


def random_case(shape, dtype=jnp.float32):
    """Return ((x, weight), (dresidual, dout))."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    return (normal(*shape), 1 + normal(shape[-1]) / 4), (normal(*shape), normal(*shape))


def output_and_gradients(backend, inputs, douts, style=LLAMA_NORM):
    """Return ((x, normed), (dx, dweight)) in float32."""

    @jax.jit
    def compute(inputs, douts):
        out, pull = jax.vjp(lambda x, weight: stream_norm(x, weight, EPS, style, backend=backend), *inputs)
        return out, pull(douts)

    return jax.tree.map(lambda x: np.asarray(x, np.float32), compute(inputs, douts))


def assert_close(got, expected, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def test_reference_matches_numpy():
    (x, weight), _ = random_case((2, 3, 24))
    stream, normed = stream_norm(x, weight, EPS, backend="reference")
    np.testing.assert_array_equal(stream, x)
    np.testing.assert_allclose(normed, x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + EPS) * weight, rtol=1e-5)


@pytest.mark.parametrize("style", [LAYER_NORM, NormStyle(centered=True), NormStyle(1.0, False, True, True)])
def test_layer_norms_match_their_definition(style):
    (x, weight), (_, dout) = random_case((2, 5, 24))
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(24), jnp.float32) if style.bias else None

    def definition(x, weight, bias):
        spread = jnp.sqrt(jnp.var(x, -1, keepdims=True) + EPS)
        return (x - jnp.mean(x, -1, keepdims=True)) / spread * (style.offset + weight) + (0 if bias is None else bias)

    got, pull = jax.vjp(lambda x, weight, bias: norm(x, weight, EPS, style, bias), x, weight, bias)
    expected, definition_pull = jax.vjp(definition, x, weight, bias)
    assert_close((got, pull(dout)), (expected, definition_pull(dout)), 1e-5)
    np.testing.assert_array_equal(stream_norm(x, weight, EPS, style, bias)[1], got)
    half = (y.astype(jnp.bfloat16) for y in (x, weight))
    assert_close(norm(*half, EPS, style, bias).astype(jnp.float32), expected, 0.01)


def test_a_bias_comes_with_its_style():
    (x, weight), _ = random_case((2, 24))
    with pytest.raises(ValueError, match=r"has a bias \[24\], got none"):
        norm(x, weight, EPS, LAYER_NORM)
    with pytest.raises(ValueError, match=r"has no bias, got \[24\]"):
        norm(x, weight, EPS, bias=weight)


@pytest.mark.parametrize(("shape", "style"), [((2, 5, 64), LLAMA_NORM), ((3, 1, 45), GEMMA)])
def test_interpreted_kernels_match_the_reference(shape, style, interpreted_backend):
    case = random_case(shape)
    expected = output_and_gradients("reference", *case, style)
    with NORM_ROPE.using(interpreted_backend):
        assert_close(output_and_gradients("auto", *case, style), expected, 1e-6)


def added_norm(backend, stream, style, inputs, dout):
    """Return the norm of x, plus a stream if there is one, and all gradients."""

    @jax.jit
    def compute(inputs, stream, dout):
        def function(x, weight, stream):
            return norm(x, weight, EPS, style, stream=stream, backend=backend)

        out, pull = jax.vjp(function, *inputs, stream)
        return out, pull(dout)

    return jax.tree.map(lambda x: np.asarray(x, np.float32), compute(inputs, stream, dout))


@pytest.mark.parametrize("style", [LLAMA_NORM, GEMMA])
@pytest.mark.parametrize("has_stream", [False, True])
def test_norms_of_what_is_added_match_the_definition(style, has_stream, interpreted_backend):
    inputs, (stream, dout) = random_case((2, 5, 45))
    stream = stream if has_stream else None
    expected = added_norm("reference", stream, style, inputs, dout)
    wide = style.offset + inputs[1]
    definition = inputs[0] / np.sqrt(np.mean(np.square(inputs[0]), -1, keepdims=True) + EPS) * wide
    np.testing.assert_allclose(expected[0], definition + (0 if stream is None else stream), rtol=1e-4, atol=1e-5)
    with NORM_ROPE.using(interpreted_backend):
        assert_close(added_norm("auto", stream, style, inputs, dout), expected, 1e-6)


def fp8_results(inputs, douts, style=LLAMA_NORM):
    """Return (dx, dweight) of `fp8_stream_norm`; and e4m3 values, their scales and 1 / x's root mean square."""

    @jax.jit
    def compute(inputs, douts):
        def values(x, weight):
            stream, values, *rows = fp8_stream_norm(x, weight, EPS, style)
            return (stream, values), rows

        _, pull, rows = jax.vjp(values, *inputs, has_aux=True)
        return pull(douts), rows

    return compute(inputs, douts)


def assert_values_are_those_of_the_norm(rows, case, style=LLAMA_NORM):
    values, scales, inverse = rows
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), case[0])
    normed = rms_norm(*case[0], EPS, style)
    expected, expected_scales = quantize_rows(normed)
    np.testing.assert_allclose(inverse, inverse_rms(wide[0], EPS), rtol=1e-5)
    np.testing.assert_allclose(scales, expected_scales, rtol=0.01)
    got, expected = (np.asarray(x.astype(jnp.float32)) for x in (values, expected))
    got = np.where(2 * got == expected, expected, got)  # Triton 3.7.1's interpreter loses the carry into the exponent
    np.testing.assert_allclose(got, expected, rtol=0.13, atol=2**-9)
    assert np.mean(got != expected) <= 0.02  # ties, after a quotient's last bit


@pytest.mark.parametrize("style", [LLAMA_NORM, GEMMA])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_a_norm_is_written_as_codes(kernels, style, interpreted_backend):
    case = random_case((2, 5, 64))
    with NORM_ROPE.using(interpreted_backend if kernels else None):
        gradients, rows = fp8_results(*case, style)
    assert_close(gradients, output_and_gradients("reference", *case, style)[1], 1e-6)
    assert_values_are_those_of_the_norm(rows, case, style)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 37, 1024), (1, 50, 2880)])
def test_a_norm_is_written_as_codes_on_a_gpu(shape):
    case = random_case(shape, jnp.bfloat16)
    gradients, rows = fp8_results(*case)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), case)
    assert_close(gradients, output_and_gradients("reference", *exact)[1], 1e-2)
    assert_values_are_those_of_the_norm(rows, case)


@pytest.mark.gpu
@pytest.mark.parametrize("style", [LLAMA_NORM, GEMMA])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(2, 37, 1024), (1, 50, 2880), (1, 9, 8192)])
def test_kernels_match_the_reference_on_a_gpu(shape, dtype, style):
    half = random_case(shape, dtype)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    expected = output_and_gradients("reference", *exact, style)
    assert_close(output_and_gradients("triton", *half, style), expected, 1e-2)
    inputs, (stream, dout) = half
    got, (inputs, (exact_stream, exact_dout)) = added_norm("triton", stream, style, inputs, dout), exact
    assert_close(got, added_norm("reference", exact_stream, style, inputs, exact_dout), 1e-2)


def test_frozen_norm_is_one_kernel_each_way(h200):
    def step(x, weight, douts):
        out, pull = jax.vjp(lambda x: stream_norm(x, weight, EPS), x)
        return out[1], pull(douts)

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=h200)

    x = shaped(1, 4096, 2880)
    with tracing_for((9, 0)):
        compiled = jax.jit(step).lower(x, shaped(2880), (x, x)).compile()
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 2
    assert compiled.memory_analysis().temp_size_in_bytes < 1024


def test_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"x's last axis, \[8\], got shape \(4,\)"):
        stream_norm(jnp.zeros((2, 8)), jnp.zeros(4), EPS)
