import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.rows import sum_rows, take_rows


@jax.jit
def taken_and_gradient(table, indices, gradient):
    rows, pull = jax.vjp(lambda table: take_rows(table, indices), table)
    return rows, *pull(gradient)


@pytest.mark.parametrize(("size", "count"), [(1, 7), (40, 1), (40, 300), (300, 40)])
def test_gradient_is_the_sum_of_each_index(size, count):
    rng = np.random.default_rng(0)
    indices = rng.integers(0, size, (2, count))
    gradient = rng.standard_normal((2, count, 3), np.float32)
    expected = np.zeros((size, 3))
    np.add.at(expected, indices, gradient)
    table = jnp.asarray(rng.standard_normal((size, 3), np.float32))
    rows, got = taken_and_gradient(table, indices, gradient)
    np.testing.assert_array_equal(rows, np.asarray(table)[indices])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_indices_outside_are_dropped():
    found = sum_rows(jnp.ones((3, 2)), jnp.array([1, 5, 1]), 2)
    np.testing.assert_array_equal(found, [[0, 0], [2, 2]])


@pytest.mark.gpu
def test_sum_is_the_same_in_every_run_on_a_gpu():
    rng = np.random.default_rng(0)
    rows, indices = jnp.asarray(rng.standard_normal((8192, 256), np.float32)), jnp.asarray(rng.integers(0, 50, 8192))
    total = jax.jit(sum_rows, static_argnames="size")
    first = total(rows, indices, size=50)
    assert all((total(rows, indices, size=50) == first).all() for _ in range(20))
