import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.delta_rule import causal_convolution, gated_rms_norm
from jaxglue.ops.segments import pack_segments
from tests.closeness import assert_close, outputs_and_gradients

LENGTHS, T, C = [1, 2, 9, 3, 1], 20, 5
X = jax.random.normal(jax.random.key(0), (1, T, C))
WEIGHT = jax.random.normal(jax.random.key(1), (C, 1, 4))


def silu(x):
    return x / (1 + np.exp(-x))


def test_convolution_is_the_sum_over_a_documents_last_tokens():
    got = causal_convolution(X, WEIGHT, pack_segments([LENGTHS], seq_len=T))[0]
    x, weight, start = np.asarray(X[0], np.float64), np.asarray(WEIGHT[:, 0], np.float64), 0
    expected = np.zeros((T, C))
    for length in LENGTHS:
        for t in range(start, start + length):
            first = max(start, t - 3)
            expected[t] = silu(sum(weight[:, 3 - (t - s)] * x[s] for s in range(first, t + 1)))
        start += length
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_convolution_of_packed_documents_equals_separate_ones():
    cotangent, start = jax.random.normal(jax.random.key(2), X.shape), 0

    def compute(x, lengths, cotangent):
        segments = pack_segments([lengths], seq_len=x.shape[1])
        return outputs_and_gradients(lambda x, w: causal_convolution(x, w, segments), (x, WEIGHT), cotangent)

    out, dx, dw = compute(X, LENGTHS, cotangent)
    total = np.zeros(WEIGHT.shape)
    for length in LENGTHS:
        document = slice(start, start + length)
        alone = compute(X[:, document], [length], cotangent[:, document])
        assert_close([out[:, document], dx[:, document]], alone[:2], 1e-6)
        total += alone[2]
        start += length
    np.testing.assert_allclose(dw, total, atol=1e-5)
    assert not np.any(out[:, start:])
    assert not np.any(dx[:, start:])


def test_convolution_refuses_other_channels():
    with pytest.raises(ValueError, match=r"weight must be \[C, 1, W\] with C = 5"):
        causal_convolution(X, WEIGHT[:4], pack_segments([[T]], seq_len=T))


def test_gated_norm_multiplies_the_norm_by_its_gate():
    x, gate = X[0], X[0, ::-1]
    weight = jnp.linspace(0.5, 2.0, C)
    got = gated_rms_norm(x, gate, weight, 1e-6)
    x, gate = np.asarray(x, np.float64), np.asarray(gate, np.float64)
    expected = np.asarray(weight) * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * silu(gate)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


def test_gated_norm_refuses_another_shape():
    with pytest.raises(ValueError, match="gate must be"):
        gated_rms_norm(X, X[:, 1:], jnp.ones(C), 1e-6)
