import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.sampling import SAMPLING, choose_tokens, likeliest
from jaxglue.ops.sampling.reference import BLOCK


def rows_of(B: int, V: int):
    """Return logits, temperatures of which some are 0, and numbers that decide the draws, the smallest among them."""
    keys = jax.random.split(jax.random.key(0), 3)
    temperature = jnp.where(jnp.arange(B) % 4 == 3, 0.0, jax.random.uniform(keys[1], B, minval=0.5, maxval=1.5))
    return 4 * jax.random.normal(keys[0], (B, V)), temperature, jax.random.uniform(keys[2], B).at[0].set(0.0)


@pytest.fixture
def kernels(interpreted):
    from jaxglue.ops.sampling.triton import TritonSampling

    return interpreted(TritonSampling)(compute_capability=90)


def assert_equal(got, want) -> None:
    np.testing.assert_array_equal(got.tokens, want.tokens)
    for found, expected in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("V", [2 * BLOCK + 33, repeat(97)])
@pytest.mark.parametrize("draws", [False, True])
def test_interpreted_kernels_choose_as_the_reference(V, draws, kernels):
    logits, temperature, uniform = rows_of(6, V)
    logits = (
        logits.at[1, : V // BLOCK // 2 * BLOCK].set(-jnp.inf).at[2, [5, V - 1]].set(9.0)
    )  # a block without tokens, equal ones
    settings = (temperature, uniform) if draws else (None, None)
    with SAMPLING.using(kernels):
        got = choose_tokens(logits, *settings)
    assert_equal(got, choose_tokens(logits, *settings))
    np.testing.assert_allclose(got.normalizers, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_interpreted_kernels_show_logits_that_are_not_finite(value, kernels):
    logits, temperature, uniform = rows_of(2, 2 * BLOCK)
    with SAMPLING.using(kernels):
        got = choose_tokens(logits.at[1, 7].set(value), temperature, uniform)
    assert np.isfinite(got.normalizers).tolist() == [True, False]
    assert (np.asarray(got.tokens) < 2 * BLOCK).all() and (np.asarray(got.tokens) >= 0).all()


@pytest.mark.parametrize("count", [0, 3, 40])
def test_likeliest_tokens_are_the_first_of_equal_ones(count):
    logits = jnp.round(2 * jax.random.normal(jax.random.key(0), (5, 4001)))  # most values many times
    for found, expected in zip(likeliest(logits, count), jax.lax.top_k(logits, count), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "V"), [(1, 151_936), (64, 50_257), (256, 151_936)])
def test_kernels_choose_as_the_reference_on_a_gpu(B, V):
    from jaxglue.ops.backend import compute_capability
    from jaxglue.ops.sampling.triton import TritonSampling

    logits, temperature, uniform = rows_of(B, V)
    for settings in ((None, None), (temperature, uniform)):
        with SAMPLING.using(TritonSampling.of(compute_capability())):
            got = jax.jit(choose_tokens)(logits, *settings)
        with SAMPLING.using(None):
            want = jax.jit(choose_tokens)(logits, *settings)
        np.testing.assert_allclose(got.normalizers, want.normalizers, rtol=1e-5)
        same = np.asarray(got.tokens == want.tokens)
        # A number within the rounding of cumulated sums of a border falls to either side.
        assert same.mean() > 0.98 and (settings[0] is not None or same.all())
        for found, expected in zip(got[1:3], want[1:3], strict=True):
            np.testing.assert_allclose(np.asarray(found)[same], np.asarray(expected)[same], rtol=1e-4, atol=1e-4)
