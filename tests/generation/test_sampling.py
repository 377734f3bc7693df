import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeats_parts_of

from jaxglue.generation import sampling
from jaxglue.generation.sampling import Controls, Counts, Features
from jaxglue.ops.sampling import Truncation
from jaxglue.ops.sampling.reference import Weights, _first_above, _threshold

PROBABILITIES = np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32)
LOGITS = np.log(PROBABILITIES)
DRAWS = 2000


sample = jax.jit(sampling.sample, static_argnames="features")


def controls(count: int, **changed) -> Controls:
    """Return settings of `count` sequences that differ in their answers' indices alone."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values |= {"repetition": 1.0, "presence": 0.0, "frequency": 0.0} | changed
    columns = {
        name: jnp.full(count, value, jnp.int32 if name == "top_k" else jnp.float32) for name, value in values.items()
    }
    names = jnp.stack([jnp.full(count, 7), jnp.zeros(count, int), jnp.arange(count)], axis=1).astype(jnp.uint32)
    bias = {"bias_tokens": jnp.full((count, 1), 1), "biases": jnp.full((count, 1), 2.0)}
    return Controls(names=names, **columns, **bias)


def frequencies(features: Features, logits=LOGITS, **changed) -> np.ndarray:
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (DRAWS, 1))
    tokens = sample(rows, controls(DRAWS, **changed), jnp.arange(DRAWS), None, features=features).tokens
    return np.bincount(tokens, minlength=len(logits)) / DRAWS


def assert_drawn_from(found: np.ndarray, probabilities: np.ndarray) -> None:
    """Check frequencies within 4 standard deviations of their own."""
    p = np.asarray(probabilities, np.float64) / np.sum(probabilities)
    assert (np.abs(found - p) <= 4 * np.sqrt(p * (1 - p) / DRAWS)).all()


@pytest.mark.parametrize(
    ("features", "changed", "kept"),
    [
        (Features(draws=True), {}, [1, 1, 1, 1, 1]),
        (Features(draws=True, top_p=True), {"top_p": 0.7}, [0, 1, 0, 1, 0]),
        (Features(draws=True, top_p=True), {"top_p": 0.71}, [0, 1, 1, 1, 0]),
        (Features(draws=True, top_p=True), {"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        (Features(draws=True, top_p=True), {"top_p": 1.0}, [1, 1, 1, 1, 1]),
        (Features(draws=True, top_k=True), {"top_k": 3}, [0, 1, 1, 1, 0]),
        (Features(draws=True, top_k=True), {"top_k": 0}, [1, 1, 1, 1, 1]),
        (Features(draws=True, top_k=True, top_p=True), {"top_k": 3, "top_p": 0.8}, [0, 1, 0, 1, 0]),
        (Features(draws=True, min_p=True), {"min_p": 0.3}, [0, 1, 1, 1, 0]),
    ],
)
def test_draws_follow_the_probabilities_of_kept_tokens(features, changed, kept):
    assert_drawn_from(frequencies(features, **changed), PROBABILITIES * kept)


def test_temperature_flattens_and_equal_logits_stay_together():
    assert_drawn_from(frequencies(Features(draws=True), temperature=2.0), np.sqrt(PROBABILITIES))
    even = frequencies(Features(draws=True, top_k=True), np.zeros(4), top_k=1)
    assert_drawn_from(even, np.ones(4))


def test_vocabularies_of_several_blocks_are_drawn_whole():
    logits = np.full(3000, -50.0)
    logits[[5, 1023, 1024, 2999]] = np.log([0.1, 0.2, 0.3, 0.4])
    found = frequencies(Features(draws=True), logits)
    assert_drawn_from(found[[5, 1023, 1024, 2999]], np.array([0.1, 0.2, 0.3, 0.4]))


def test_penalties_and_biases_change_logits_as_documented():
    features = Features(penalties=True, biases=True)
    logits = jnp.asarray([[3.0, 2.5, -1.0, 2.0]])
    seen, answered = jnp.asarray([[True, False, True, False]]), jnp.asarray([[2, 0, 0, 0]])
    settings = controls(1, temperature=0.0, repetition=1.5, presence=0.25, frequency=0.5)
    found = sample(logits, settings, jnp.zeros(1, jnp.int32), Counts(seen=seen, answered=answered), features=features)
    adjusted = np.array([3.0 / 1.5 - 2 * 0.5 - 0.25, 2.5 + 2.0, -1.0 * 1.5, 2.0])
    assert found.tokens.tolist() == [adjusted.argmax()]
    np.testing.assert_allclose(found.log_probs, jax.nn.log_softmax(adjusted)[1:2], rtol=1e-6)
    np.testing.assert_allclose(found.model_log_probs, jax.nn.log_softmax(logits)[0, 1:2], rtol=1e-6)


def test_log_probabilities_are_reported_before_truncation():
    logits = jnp.log(jnp.asarray(PROBABILITIES))[None]
    features = Features(draws=True, top_p=True, top=2)
    found = sample(logits, controls(1, temperature=0.5, top_p=0.1), jnp.zeros(1, jnp.int32), None, features=features)
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(found.log_probs, np.log(sharp[1:2]), rtol=1e-5)
    np.testing.assert_allclose(found.model_log_probs, np.log(PROBABILITIES[1:2]), rtol=1e-5)
    assert found.top_tokens.tolist() == [[1, 3]]
    np.testing.assert_allclose(found.top_log_probs, np.log(PROBABILITIES[[1, 3]])[None], rtol=1e-5)


@repeats_parts_of("test_draws_follow_the_probabilities_of_kept_tokens")
def test_a_row_keeps_the_same_tokens_whatever_others_use():
    rng = np.random.default_rng(3)
    used = np.array([*itertools.product((False, True), repeat=3)] * 2).T
    rows = used.shape[1]
    weights = np.exp(rng.normal(size=(rows, 3000)) * 3).astype(np.float32)
    weights = jnp.asarray(weights / weights.max(-1, keepdims=True))
    total = Weights(jnp.log(weights), jnp.zeros(rows), jnp.ones(rows)).sums.sum(-1)
    top_k = np.where(used[0], rng.integers(1, 200, rows), 0).astype(np.int32)
    top_p = np.where(used[1], rng.uniform(0.1, 0.99, rows), 1).astype(np.float32)
    min_p = np.where(used[2], rng.uniform(0.001, 0.3, rows), 0).astype(np.float32)
    threshold = jax.jit(_threshold)
    together = np.asarray(threshold(weights, total, Truncation(*map(jnp.asarray, (top_k, top_p, min_p)))))
    for row in range(rows):
        parts = [
            jnp.asarray(part[row : row + 1]) if used[i, row] else None for i, part in enumerate((top_k, top_p, min_p))
        ]
        alone = threshold(weights[row : row + 1], total[row : row + 1], Truncation(*parts))
        assert float(alone[0]) == together[row], (used[:, row], row)
    assert (together[~used.any(0)] == 0).all()


def test_min_p_does_not_change_the_nucleus():
    weights = np.array([0.31, 0.19, 0.13, 0.10, 0.07, 0.065, 0.05, 0.045, 0.04], np.float32)
    weights = jnp.asarray(weights / weights[0])[None]
    for top_k in (None, 0, 9):
        k = None if top_k is None else jnp.array([top_k])
        least = _threshold(weights, weights.sum(-1), Truncation(k, jnp.array([0.8]), jnp.array([0.15])))
        assert int((weights >= least[:, None]).sum()) == 6


def test_a_token_of_weight_0_is_never_drawn():
    weights = jnp.array([[0.0, 0.0, 0.5, 0.0, 0.5, 0.0]])
    for target, index in ((-1e-7, 2), (0.0, 2), (0.5, 4), (1.0, 2)):  # rounding may leave less than 0, or all
        assert int(_first_above(weights, jnp.array([target]))[0][0]) == index


def test_random_numbers_depend_on_seed_request_answer_and_position_alone():
    names = np.array([(0, 3, 1, 9), (0, 3, 0, 9), (1, 3, 0, 9), (0, 4, 0, 9), (0, 4, 0, 8)], np.uint32)
    uniform = sampling._uniform(names[:, :3], jnp.asarray(names[:, 3], jnp.int32))
    assert len(set(uniform.tolist())) == len(names)
    for number, (seed, *others) in zip(uniform, names.tolist(), strict=True):
        key = jax.random.key(seed)
        for other in others:
            key = jax.random.fold_in(key, other)
        assert number == jax.random.uniform(key)
