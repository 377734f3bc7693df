"""Divergences from a teacher equal TRL's, in chunks of any size; the most likely tokens stand for all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.cross_entropy import linear_divergences

TRL = {
    0.0: (3.5870137, 1.5809656, 2.2616864),
    0.3: (0.4072957, 0.1205914, 0.1917155),
    1.0: (3.1850450, 1.1164923, 1.6457054),
}
"""By β at temperature 0.8: the mean over counted tokens; norm, and Σ gradient · cos(index) of the gradient to x, from
`_chunked_divergence_loss` of trl 1.16 on the arrays below."""


def arrays():
    rng = np.random.default_rng(0)
    shapes = ((1, 6, 8), (11, 8), (1, 6, 5), (11, 5))
    x, w, t, v = (jnp.asarray(rng.normal(0, 1, shape), jnp.float32) for shape in shapes)
    return x[0], w, t[0], v, jnp.asarray([1.0, 1, 0, 1, 1, 0])


def loss(x, w, t, v, counted, **options):
    return linear_divergences(x, w, t, v, counted, **options).sum() / counted.sum()


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("beta", TRL)
def test_divergences_equal_trl(beta, chunk):
    value, gradient = jax.value_and_grad(loss)(*arrays(), beta=beta, temperature=0.8, chunk=chunk)
    flat = np.asarray(gradient, np.float64).ravel()
    found = value, np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size))
    np.testing.assert_allclose(found, TRL[beta], rtol=2e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_most_likely_tokens_and_the_rest_bound_the_whole_divergence(beta):
    values = [float(loss(*arrays(), beta=beta, top_k=top_k)) for top_k in (1, 4, 10, None)]
    assert (np.diff(values) > -1e-5).all() and values[0] < 0.9 * values[3]  # merging tokens never raises a divergence
    assert values[2] == pytest.approx(values[3], rel=1e-5)  # one token is the rest


def test_moving_probability_out_of_the_likely_tokens_is_no_way_out():
    """The gradient of the reverse divergence raises the teacher's tokens, where the student has none of them."""
    teacher = jnp.asarray([[4.0, 3.0, 0.0, 0.0]])
    logits, one = jnp.asarray([[-2.0, -2.0, 3.0, 3.0]]), jnp.eye(4)

    def divergence(logits):
        return linear_divergences(logits, one, teacher, one, jnp.ones(1), beta=1.0, top_k=2).sum()

    gradient = jax.grad(divergence)(logits)[0]
    assert gradient[0] < 0 and gradient[1] < 0 and gradient[2] > 0
