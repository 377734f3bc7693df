"""Distillation on answers of the rows, beside their cross-entropy, as torchtune and ms-swift weigh them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.data.batch import Rollouts, row_of_documents
from jaxglue.engine.head_values import HeadValues
from jaxglue.objectives.config import ObjectiveConfig

T, V = 8, 11
RNG = np.random.default_rng(0)
HIDDEN, MATRIX, TEACHER, TEACHER_MATRIX = (RNG.normal(size=shape) for shape in ((T, 4), (V, 4), (T, 3), (V, 3)))


@pytest.fixture
def batch():
    """A row of one answer, whose tokens the model did not sample."""
    tokens = RNG.integers(0, V, T).astype(np.int32)
    batch = jax.tree.map(jnp.asarray, row_of_documents([(tokens, np.arange(T) > 2)], seq_len=T, max_segments=1))
    rollouts = Rollouts(
        owners=jnp.zeros((1, T), jnp.int32),
        advantages=jnp.zeros((1, 1)),
        sampler=jnp.full((1, T), jnp.nan),
        teacher=jnp.asarray(TEACHER[None], jnp.float32),
        teacher_matrix=jnp.asarray(TEACHER_MATRIX, jnp.float32),
    )
    return replace(batch, rollouts=rollouts)


def loss(batch, **settings):
    """Return the sum of the losses, and its gradient to the hidden states."""
    objective = ObjectiveConfig(objective="distill", **settings).make()
    output = SimpleNamespace(weight=jnp.asarray(MATRIX, jnp.float32))

    def total(hidden):
        return objective(HeadValues(hidden, output, batch, softcap=None, temperature=objective.temperature), batch)[0]

    return jax.value_and_grad(total)(jnp.asarray(HIDDEN, jnp.float32))


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("ratio", [0.5, 0.8])
def test_the_mix_is_torchtunes(batch, ratio):
    """Its loss, (1 − r) · cross-entropy + r · ForwardKLLoss, is r times ours, but for the teacher's entropy."""
    p, q = softmax(TEACHER @ TEACHER_MATRIX.T), softmax(HIDDEN @ MATRIX.T)
    one_hot, counted = np.eye(V)[np.asarray(batch.targets[0])], np.asarray(batch.loss_weights[0], np.float64)
    theirs = (1 - ratio) * -(one_hot * np.log(q)).sum(-1) + ratio * -(p * np.log(q)).sum(-1)
    gradient = ((1 - ratio) * (q - one_hot) + ratio * (q - p)) @ MATRIX
    value, ours = loss(batch, beta=0.0, sft_alpha=(1 - ratio) / ratio)
    entropy = -(counted * (p * np.log(p)).sum(-1)).sum()
    assert counted.sum() > 3
    np.testing.assert_allclose(ratio * (value + entropy), (counted * theirs).sum(), rtol=1e-5)
    np.testing.assert_allclose(ratio * ours, counted[:, None] * gradient, atol=1e-5)


def test_temperature_is_of_the_divergence_alone(batch):
    values = [loss(batch, temperature=2.0, sft_alpha=weight)[0] for weight in (0.0, 1.0)]
    q, counted = softmax(HIDDEN @ MATRIX.T), np.asarray(batch.loss_weights[0])
    own = -np.log(q[np.arange(T), np.asarray(batch.targets[0])])
    np.testing.assert_allclose(values[1] - values[0], (counted * own).sum(), rtol=1e-4)


def test_answers_of_the_model_have_the_divergence_alone(batch):
    sampled = replace(batch, rollouts=replace(batch.rollouts, sampler=jnp.zeros((1, T))))
    for mixed, plain in zip(loss(sampled, sft_alpha=1.0), loss(batch), strict=True):
        np.testing.assert_array_equal(mixed, plain)
