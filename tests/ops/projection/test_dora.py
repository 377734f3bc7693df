"""Row norms of weights with adapters, without the sum in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.projection.dora import magnitude_gain, row_norms
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import quantize_matrix


@pytest.mark.parametrize("how", ["none", "nf4", "int8", "fp8"])
def test_gain_is_the_magnitude_over_the_norm_of_the_sum(how):
    keys = jax.random.split(jax.random.key(0), 4)
    weight = quantize_matrix(jax.random.normal(keys[0], (24, 128)), how)
    matrix = weight if how == "none" else dequantize(weight, jnp.float32)
    A, b = 0.3 * jax.random.normal(keys[1], (4, 128)), jax.random.normal(keys[2], (24, 4))
    magnitude = jax.random.uniform(keys[3], (24,)) + 1
    expected = magnitude / np.linalg.norm(matrix + b @ A, axis=1)
    for dtype, precision in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)):
        np.testing.assert_allclose(magnitude_gain(weight, A, b, magnitude, dtype=dtype), expected, rtol=precision)
    np.testing.assert_allclose(row_norms(weight), np.linalg.norm(matrix, axis=1), rtol=1e-5)


def test_the_norm_is_a_constant_of_the_gradient():
    weight, A, b, magnitude = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones((3, 2)), jnp.ones(3)
    gradients = jax.grad(lambda *values: magnitude_gain(weight, *values, dtype=jnp.float32).sum(), (0, 1, 2))(
        A, b, magnitude
    )
    assert not gradients[0].any() and not gradients[1].any()
    np.testing.assert_allclose(gradients[2], 1 / (3 * 8**0.5), rtol=1e-6)
