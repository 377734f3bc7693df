"""FP8 products against float32: on random data, with outliers, and as the matmuls that XLA compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats

from jaxglue.engine.compiler import jit_step
from jaxglue.ops.projection.fp8 import check_fp8, project_fp8
from jaxglue.ops.quant.fp8 import FP8Weight, dequantize_fp8, quantize_fp8, quantize_rows

SIZES = {"attention": (64, (64, 32, 32)), "feed-forward": (64, (192, 192)), "down": (192, (64,))}


def make_inputs(size, outs, dtype=jnp.float32):
    """Return (x, matrices, cotangents)."""
    x, *others = jax.random.split(jax.random.key(size), 1 + 2 * len(outs))
    matrices = [jax.random.normal(key, (out, size)) * 0.02 for key, out in zip(others, outs, strict=False)]
    dys = [jax.random.normal(key, (2, 48, out), dtype) * 1e-5 for key, out in zip(others[::-1], outs, strict=False)]
    return jax.random.normal(x, (2, 48, size), dtype), matrices, dys


def outputs_and_gradient(x, weights, dys):
    ys, vjp = jax.vjp(lambda x: project_fp8(x, weights), x)
    return [*ys, vjp(dys)[0]]


def expected_outputs_and_gradient(x, matrices, dys):
    x, dys = x.astype(jnp.float32), [dy.astype(jnp.float32) for dy in dys]
    with jax.default_matmul_precision("highest"):
        return [*(x @ matrix.T for matrix in matrices), sum(dy @ m for dy, m in zip(dys, matrices, strict=True))]


def cosine(a, b):
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("dtype", [jnp.float32, repeat(jnp.bfloat16)])
@pytest.mark.parametrize("layer", repeats(SIZES, "down", "feed-forward"))
def test_products_and_gradients_are_close_to_float32(layer, dtype):
    x, matrices, dys = make_inputs(*SIZES[layer], dtype)
    got = outputs_and_gradient(x, [quantize_fp8(matrix) for matrix in matrices], dys)
    for result, expected in zip(got, expected_outputs_and_gradient(x, matrices, dys), strict=True):
        assert result.dtype == dtype
        assert cosine(result, expected) > 0.998


@pytest.mark.parametrize("layer", SIZES)
def test_outlier_channels_keep_the_direction(layer):
    x, matrices, dys = make_inputs(*SIZES[layer])
    x, dys = x.at[..., :3].multiply(50), [dy.at[..., :3].multiply(50) for dy in dys]
    got = outputs_and_gradient(x, [quantize_fp8(matrix) for matrix in matrices], dys)
    for result, expected in zip(got, expected_outputs_and_gradient(x, matrices, dys), strict=True):
        assert cosine(result, expected) > 0.998


@pytest.mark.parametrize("layer", SIZES)
def test_gradients_of_trained_weights_are_not_in_fp8(layer):
    x, matrices, dys = make_inputs(*SIZES[layer])
    _, vjp = jax.vjp(lambda x, weights: project_fp8(x, weights), x, matrices)
    dx, gradients = vjp(dys)
    assert cosine(dx, expected_outputs_and_gradient(x, matrices, dys)[-1]) > 0.998
    for gradient, dy in zip(gradients, dys, strict=True):
        np.testing.assert_allclose(gradient, jnp.einsum("bto,bti->oi", dy, x), rtol=1e-4, atol=1e-9)


def test_outliers_do_not_drown_other_channels():
    x = jax.random.normal(jax.random.key(0), (16, 512)).at[:, :4].multiply(50)
    values, scales = quantize_rows(x)
    others = x[:, 4:]
    error = jnp.linalg.norm(values.astype(jnp.float32)[:, 4:] * scales - others) / jnp.linalg.norm(others)
    assert error < 0.04  # as without outliers: e4m3 is a floating-point format


def test_weights_take_a_byte_and_come_back():
    matrix = jax.random.normal(jax.random.key(0), (32, 256)).at[5].set(0).at[6].multiply(1e-4)
    weight = quantize_fp8(matrix.astype(jnp.bfloat16))
    assert (weight.values.nbytes, weight.scales.nbytes) == (matrix.size, 4 * 32)
    error = jnp.abs(dequantize_fp8(weight, jnp.float32) - matrix).max(axis=1)
    assert np.all(error <= jnp.abs(matrix).max(axis=1) / 16)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_rows_of_any_magnitude_stay_finite(scale):
    x = jnp.full((1, 64), scale, jnp.bfloat16)
    values, scales = quantize_rows(x)
    np.testing.assert_allclose(values.astype(jnp.float32) * scales, x.astype(jnp.float32), rtol=1e-6)


def test_no_activation_is_kept_for_the_backward_pass():
    x, matrices, _ = make_inputs(*SIZES["attention"])
    weights = [quantize_fp8(matrix) for matrix in matrices]
    kept = jax.tree.leaves(jax.vjp(lambda x: project_fp8(x, weights), x)[1])
    assert {leaf.shape for leaf in kept} <= {leaf.shape for leaf in jax.tree.leaves(weights)}


def test_widths_that_differ_are_refused():
    weight = quantize_fp8(jnp.ones((8, 32)))
    with pytest.raises(ValueError, match=r"weights must be \[out, 64\] to fit x, got \[8, 32\]"):
        project_fp8(jnp.ones((4, 64)), [weight])


def test_gpus_without_fp8_are_refused():
    check_fp8((8, 9))
    with pytest.raises(ValueError, match=r"--matmul fp8: compute capability must be 8\.9 or newer, got 8\.0"):
        check_fp8((8, 0))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_products_compile_to_fp8_matmuls(gpu_target, capability):
    sharding = gpu_target(capability)

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weight = FP8Weight(
        values=shaped(512, 256, dtype=jnp.float8_e4m3fn), scales=shaped(512, dtype=jnp.float32), dtype=jnp.bfloat16
    )
    x, dy = shaped(1024, 256), shaped(1024, 512)
    forward = jit_step(lambda x, weight: project_fp8(x, [weight]))
    backward = jit_step(lambda x, weight, dy: jax.vjp(lambda x: project_fp8(x, [weight])[0], x)[1](dy))
    for step, arguments in ((forward, (x, weight)), (backward, (x, weight, dy))):
        assert "__cublas$lt$matmul$f8" in step.lower(*arguments).compile().as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("layer", SIZES)
def test_products_on_a_gpu_are_close_to_float32(layer):
    size, outs = SIZES[layer]
    x, matrices, dys = make_inputs(16 * size, [16 * out for out in outs], jnp.bfloat16)
    results = jax.jit(outputs_and_gradient)(x, [quantize_fp8(matrix) for matrix in matrices], dys)
    for result, expected in zip(results, expected_outputs_and_gradient(x, matrices, dys), strict=True):
        assert cosine(result, expected) > 0.998
