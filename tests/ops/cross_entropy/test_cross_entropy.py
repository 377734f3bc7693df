"""Cross-entropy fused with the output projection, and its kernel, against the definition in float32."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops import cross_entropy as module
from jaxglue.ops.cross_entropy import (
    cap_logits,
    chunk_size,
    linear_cross_entropy,
    linear_divergences,
    linear_entropies,
    linear_log_probs,
    linear_scores,
)
from jaxglue.ops.cross_entropy.chunks import split_chunks
from jaxglue.ops.cross_entropy.reference import ReferenceCrossEntropy
from jaxglue.ops.equations import equations
from jaxglue.planner.equation_sizes import padded_bytes

M, D, V = 11, 16, 37


@pytest.fixture
def case():
    """(x, weight, targets, loss weights with some 0)."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, weight = jax.random.normal(keys[0], (M, D)), jax.random.normal(keys[1], (V, D))
    targets = jax.random.randint(keys[2], (M,), 0, V).at[3].set(V - 1)
    return x, weight, targets, jax.random.uniform(keys[3], (M,)).at[jnp.array([0, 5, 10])].set(0)


def by_definition(x, weight, targets, weights, softcap=None):
    logits = cap_logits(x @ weight.T, softcap)
    return -jnp.sum(weights * jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets])


def assert_close(got, expected, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.float32(a) - np.float32(b)) <= tolerance * np.linalg.norm(np.float32(b))


@pytest.mark.parametrize("chunk", [None, 4, 11])
def test_loss_and_gradients_match_the_definition(case, chunk):
    x, weight, *rest = case
    expected = jax.value_and_grad(by_definition, (0, 1))(x, weight, *rest)
    assert_close(jax.value_and_grad(linear_cross_entropy, (0, 1))(x, weight, *rest, chunk), expected, 1e-5)
    assert_close(linear_cross_entropy(x, weight, *rest, chunk), expected[0], 1e-5)
    frozen = jax.grad(lambda x: linear_cross_entropy(x, weight, *rest, chunk))(x)
    assert_close(frozen, expected[1][0], 1e-5)


def test_chunk_is_the_largest_power_of_two_that_fits():
    assert chunk_size(151_936) == 1024
    assert [split_chunks(2048, jnp.zeros((M, 2)))[0].shape[:2] for M in (7, 3000, 4096)] == [
        (1, 7),
        (2, 1536),
        (2, 2048),
    ]
    assert 4 * chunk_size(1000) * 1000 <= module.LOGITS_BYTES < 8 * chunk_size(1000) * 1000


@pytest.fixture
def interpreted_cross_entropy(interpreted):
    """The kernel on the CPU, with small blocks."""
    from jaxglue.ops.cross_entropy.triton import TritonCrossEntropy

    return interpreted(TritonCrossEntropy)(compute_capability=90, block=8)


@pytest.mark.parametrize(("scale", "softcap", "beyond"), [(1.0, None, 3), (200.0, None, 0), (8.0, 30.0, 3)])
def test_kernel_matches_the_reference(interpreted_cross_entropy, case, scale, softcap, beyond):
    """Logits beyond the vocabulary, larger than all others, do not count."""
    x, weight, targets, weights = case
    logits = jnp.pad(scale * x @ weight.T, ((0, 0), (0, beyond)), constant_values=1e4)
    got = replace(interpreted_cross_entropy, softcap=softcap, vocab_size=V)(logits, targets, weights, jnp.float32)
    expected = ReferenceCrossEntropy(V, softcap)(logits, targets, weights, jnp.float32)
    assert_close(got, expected, 1e-5)
    assert not np.any(got[1][np.asarray(weights) == 0]) and not np.any(got[1][:, V:])


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "softcap"), [(1000, None), (50_257, None), (50_257, 3.0)])
def test_bf16_matches_float32_on_a_gpu(vocab_size, softcap):
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight = (jax.random.normal(k, (n, 64), jnp.bfloat16) for k, n in zip(keys, (300, vocab_size), strict=False))
    rest = jax.random.randint(keys[2], (300,), 0, vocab_size), jnp.arange(300) % 3 / 2
    wide = x.astype(jnp.float32), weight.astype(jnp.float32)
    for trained in (0, (0, 1)):
        with jax.default_matmul_precision("highest"):
            expected = jax.value_and_grad(by_definition, trained)(*wide, *rest, softcap)
        got = jax.value_and_grad(partial(linear_cross_entropy, softcap=softcap), trained)(x, weight, *rest, 128)
        assert_close(got, expected, 1e-2)


@pytest.mark.parametrize("chunk", [None, 4])
def test_replaced_rows_get_gradients_and_the_weight_none(case, chunk):
    x, weight, *rest = case
    indices, values = jnp.array([2, 20, V - 1]), jax.random.normal(jax.random.key(9), (3, D))

    def with_rows(x, values):
        return by_definition(x, weight.at[indices].set(values), *rest)

    def ours(x, values):
        return linear_cross_entropy(x, weight, *rest, chunk, rows=(values, indices))

    assert_close(jax.value_and_grad(ours, (0, 1))(x, values), jax.value_and_grad(with_rows, (0, 1))(x, values), 1e-5)
    assert_close(ours(x, values), with_rows(x, values), 1e-5)


@pytest.mark.parametrize("trains_weight", [False, True])
def test_further_columns_get_a_gradient_of_their_own(case, trains_weight):
    x, weight, targets, weights = case
    columns, low_rank = (jax.random.normal(jax.random.key(key), (n, 2)) for key, n in ((5, V), (6, M)))
    trained = (x, columns, low_rank, *([weight] if trains_weight else []))

    def dense(x, columns, low_rank, weight=weight):
        return by_definition(jnp.concatenate([x, low_rank], 1), jnp.concatenate([weight, columns], 1), targets, weights)

    def fused(x, columns, low_rank, weight=weight):
        extended = jnp.concatenate([x, low_rank], 1)
        return linear_cross_entropy(extended, weight, targets, weights, 4, columns=columns)

    def by_log_probs(x, columns, low_rank, weight=weight):
        extended, counted = jnp.concatenate([x, low_rank], 1), (weights > 0) * 1.0
        return -jnp.sum(weights * linear_log_probs(extended, weight, targets, counted, 4, columns=columns))

    expected, fused, by_log_probs = (
        jax.value_and_grad(function, range(len(trained)))(*trained) for function in (dense, fused, by_log_probs)
    )
    assert_close(fused, expected, 1e-5)
    assert_close(by_log_probs, expected, 1e-5)


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_exponentials_of_products_give_the_loss_and_gradient(interpreted, case, scale):
    from jaxglue.ops.cross_entropy.triton import TritonCrossEntropy

    class WithoutGluon(TritonCrossEntropy):
        """Whose exponentials, in tiles of 16 columns, the CPU can compute."""

        def _exponentials(self, x, w, references):
            differences = x @ w.T - references[:, None]
            differences = jnp.where(jnp.arange(len(w)) < V, differences, -1e30)
            tiles = jnp.pad(differences, ((0, 0), (0, -len(w) % 16)), constant_values=-1e30).reshape(M, -1, 16)
            return jnp.exp(differences), jnp.exp(tiles).sum(2), tiles.max(2)

    kernels = interpreted(WithoutGluon)(compute_capability=90, vocab_size=V)
    x, weight, targets, weights = case
    x = (scale * x).at[jnp.array([2, 5])].multiply(50)  # logits far above the target's, which counts, and does not
    got = kernels.product_gradient(x, jnp.pad(weight, ((0, 3), (0, 0))), targets, weights)
    expected = jax.value_and_grad(by_definition)(x, weight, targets, weights)
    assert_close((got[0].sum(), got[1]), expected, 1e-5)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (200.0, None), (1.0, 3.0), (8.0, 30.0)])
def test_numerators_times_factors_are_the_gradient(interpreted_cross_entropy, case, scale, softcap):
    x, weight, targets, weights = case
    logits = (scale * x @ weight.T).at[2, V - 2].set(900.0)  # far above the first block
    logits = jnp.pad(logits, ((0, 0), (0, 3)), constant_values=1e4)
    kernels = replace(interpreted_cross_entropy, softcap=softcap, vocab_size=V)
    losses, numerators, factors = kernels.softmax_gradient(logits, targets, weights, jnp.float32)
    expected = ReferenceCrossEntropy(V, softcap)(logits, targets, weights, jnp.float32)
    assert_close((losses, numerators * factors[:, None]), expected, 1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_by_kernels_match_the_definition(interpreted_cross_entropy, case, softcap):
    x, weight, *rest = case

    def of(function):
        return jax.value_and_grad(lambda x: function(x, weight, *rest, 4, softcap=softcap).sum())(x)

    expected = jax.value_and_grad(by_definition, (0, 1))(x, weight, *rest, softcap)
    with module.CROSS_ENTROPY.using(interpreted_cross_entropy):
        loss, (dx, dweight) = jax.value_and_grad(linear_cross_entropy, (0, 1))(x, weight, *rest, 4, softcap=softcap)
        got, log_probs = of(linear_cross_entropy), of(linear_log_probs)
    assert_close((loss, (dx, dweight)), expected, 1e-5)
    assert_close((*got, -log_probs[1]), (expected[0], *2 * [expected[1][0]]), 1e-5)


@pytest.mark.parametrize("chunk", [None, 4])
def test_trained_entropies_and_their_gradients_match_the_definition(case, chunk):
    x, weight, _, factors = case
    counted = jnp.asarray(factors > 0, jnp.float32)

    def by_definition(x, weight):
        log_probs = jax.nn.log_softmax(cap_logits(x @ weight.T, 2.0, 0.7))
        return -jnp.sum(factors[:, None] * jnp.exp(log_probs) * log_probs)

    def chunked(x, weight, **options):
        found = linear_entropies(x, weight, counted, chunk, softcap=2.0, temperature=0.7, **options)
        return jnp.sum(factors * found)

    expected = jax.value_and_grad(by_definition, (0, 1))(x, weight)
    assert_close(jax.value_and_grad(partial(chunked, trained=True), (0, 1))(x, weight), expected, 1e-5)
    assert_close(jax.grad(partial(chunked, trained=True))(x, weight), expected[1][0], 1e-5)
    assert not jax.grad(chunked)(x, weight).any()


def test_matmuls_of_an_odd_vocabulary_are_of_whole_tiles():
    """XLA would pad and cut the others' arrays in every chunk."""
    x, weight = (jax.ShapeDtypeStruct((n, 16), jnp.bfloat16) for n in (16, V))
    targets, weights = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.float32)

    def all_functions(x, weight, targets, weights):
        loss = linear_cross_entropy(x, weight, targets, weights, 8)
        log_probs = linear_log_probs(x, weight, targets, weights, 8).sum() + linear_entropies(x, weight, weights).sum()
        divergence = linear_divergences(x, weight, x, weight, weights, beta=0.5).sum()
        return loss + log_probs + divergence + linear_scores(x, weight, targets, 8)[0].sum()

    for trained in ((0,), (0, 1)):
        program = jax.make_jaxpr(jax.grad(all_functions, trained))(x, weight, targets, weights)
        matmuls = [eqn for eqn, _ in equations(program.jaxpr) if eqn.primitive.name == "dot_general"]
        assert len(matmuls) > 8 and not any(map(padded_bytes, matmuls))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 4), (9, 4), (6,), (6,)), r"x must be \[M, D\] and weight \[V, D\], got"),
        (((6, 4), (4, 9), (6,), (6,)), r"x must be \[M, D\] and weight"),
        (((6, 4), (9, 4), (5,), (6,)), r"targets must be integers \[M\] = \[6\], got \(5,\)"),
        (((6, 4), (9, 4), (6,), (6, 1)), r"loss_weights must be \[M\] = \[6\]"),
    ],
)
def test_other_shapes_are_refused(shapes, message):
    x, weight, targets, loss_weights = map(jnp.zeros, shapes)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, weight, targets.astype(int), loss_weights)
