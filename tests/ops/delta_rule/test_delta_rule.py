import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.delta_rule import DELTA_RULE, DeltaCall, DeltaHeads, gated_delta_rule, gates, reference_delta_rule
from jaxglue.ops.delta_rule.chunks import ChunkedDeltaRule
from jaxglue.ops.segments import pack_forks, pack_segments
from tests.closeness import assert_close, outputs_and_gradients
from tests.selection import repeats, repeats_parts_of

K, N, H, V = 2, 4, 8, 6
HEADS = DeltaHeads(K, N, H)
SMALL = ChunkedDeltaRule(chunk=16, group=2)
ROWS = {
    "uneven": [[5, 1, 1, 23, 40, 2, 17, 1, 16, 3], [1, 15, 16, 64]],
    "one token each": [[1] * 70],
    "boundaries at chunks": [[16, 32, 48]],
    "one document": [[100]],
    "no document": [[], [3]],
}


def arguments(B, T, seed=0, dtype=jnp.float32):
    """q, k, v, g, β with decays from 1 to e⁻²⁰."""
    keys = jax.random.split(jax.random.key(seed), 5)
    q, k = (jax.random.normal(key, (B, T, K, H), dtype) for key in keys[:2])
    v = jax.random.normal(keys[2], (B, T, N, V), dtype)
    g = -jnp.exp(jax.random.uniform(keys[3], (B, T, N), minval=-7.0, maxval=3.0))
    return q, k, v, g, jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, N)))


def joined(q, k, v):
    """Return queries, keys and values side by side."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in (q, k, v)], axis=-1)


def loop(q, k, v, g, beta, lengths):
    """The rule as its equations, for one row, in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    out = np.zeros(v.shape)
    for n in range(v.shape[1]):
        for start, end in zip(np.cumsum([0, *lengths]), np.cumsum(lengths), strict=False):
            S = np.zeros((H, V))
            for t in range(start, end):
                query, key = (x[t, n * K // N] for x in (q, k))
                query, key = (x / np.sqrt((x**2).sum() + 1e-6) for x in (query, key))
                S *= np.exp(g[t, n])
                S += np.outer(key, beta[t, n] * (v[t, n] - S.T @ key))
                out[t, n] = S.T @ query / np.sqrt(H)
    return out


@pytest.mark.parametrize("rule", [reference_delta_rule, SMALL], ids=["reference", "chunked"])
def test_equals_the_equations(rule):
    T, values = 112, arguments(2, 112)
    got = jax.jit(rule)(*values, pack_segments(ROWS["uneven"], seq_len=T))
    for b, lengths in enumerate(ROWS["uneven"]):
        np.testing.assert_allclose(got[b], loop(*(x[b] for x in values), lengths), atol=2e-6)


@pytest.mark.parametrize("name", repeats([*ROWS], "one token each", "one document", "no document"))
def test_chunks_equal_the_scan(name):
    rows = ROWS[name]
    T = max(map(sum, rows)) + 7
    segments, values = pack_segments(rows, seq_len=T), arguments(len(rows), T)
    cotangent = jax.random.normal(jax.random.key(9), values[2].shape)

    def compute(rule):
        return outputs_and_gradients(lambda *values: rule(*values, segments), values, cotangent)

    got, expected = compute(SMALL), compute(reference_delta_rule)
    assert_close(got[:1], expected[:1], 1e-5)
    assert_close(got[1:], expected[1:], 1e-4)


@repeats_parts_of("test_chunks_equal_the_scan")
def test_packed_documents_equal_separate_ones():
    lengths, T = [3, 30, 1, 17, 50], 112
    values, cotangent = arguments(1, T, seed=1), jax.random.normal(jax.random.key(2), (1, T, N, V))

    def compute(values, cotangent, lengths):
        segments = pack_segments([lengths], seq_len=values[0].shape[1])
        return outputs_and_gradients(lambda *values: SMALL(*values, segments), values, cotangent)

    packed, start = compute(values, cotangent, lengths), 0
    for length in lengths:
        document = slice(start, start + length)
        alone = compute([x[:, document] for x in values], cotangent[:, document], [length])
        assert_close([x[:, document] for x in packed[:1]], alone[:1], 1e-5)
        assert_close([x[:, document] for x in packed[1:]], alone[1:], 1e-3)
        start += length


def test_reference_is_equal_to_the_bit_in_two_packings():
    T, lengths = 64, [7, 20, 1, 30]
    values = arguments(1, T, seed=3)
    bounds = np.cumsum([0, *lengths])
    order = [3, 1, 0, 2]
    moved = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in order] + [np.arange(bounds[-1], T)])
    rule = jax.jit(reference_delta_rule)
    first = rule(*values, pack_segments([lengths], seq_len=T))
    second = rule(*(x[:, moved] for x in values), pack_segments([[lengths[i] for i in order]], seq_len=T))
    np.testing.assert_array_equal(first[:, moved], second)


def test_padding_gives_zeros_and_no_gradient_whatever_it_holds():
    segments, (q, k, v, g, beta) = pack_segments([[9, 4]], seq_len=40), arguments(1, 40)
    out, *gradients = outputs_and_gradients(
        lambda *values: SMALL(*values, segments), (q, k, 1e4 * v, g, beta), jnp.ones_like(v)
    )
    assert not np.any(out[:, 13:])
    assert all(not np.any(x[:, 13:]) for x in gradients)
    assert all(np.all(np.isfinite(x)) for x in gradients)


def test_equal_keys_and_strong_decays_stay_exact():
    """Powers of the triangular system overflow for the first, sums from a chunk's beginning cancel for the second."""
    T = 128
    q, k, v, g, _ = arguments(1, T, seed=4)
    k, ones = jnp.ones_like(k), jnp.ones((1, T, N))
    segments = pack_segments([[T]], seq_len=T)
    for decay in (0.0 * g, jnp.where(jnp.arange(T)[:, None] % 8 == 0, -1000.0, -1e-3 * ones)):
        got = jax.jit(ChunkedDeltaRule())(q, k, v, decay, ones, segments)
        np.testing.assert_allclose(got[0], loop(*(x[0] for x in (q, k, v, decay, ones)), [T]), atol=1e-5)


def test_half_precision_follows_float32():
    T, lengths = 90, [[5, 60, 1, 20]]
    values, segments = arguments(1, T, dtype=jnp.bfloat16), pack_segments(lengths, seq_len=T)
    call = joined(*values[:3]), *values[3:], segments, HEADS
    got, exact = (gated_delta_rule(*call, backend=name) for name in ("auto", "reference"))
    assert got.dtype == jnp.bfloat16
    assert_close([got.astype(jnp.float32)], [exact.astype(jnp.float32)], 4e-3)


def test_gates_are_those_of_the_layer():
    a, b = jnp.array([[[-1.0, 2.0]]], jnp.bfloat16), jnp.array([[[0.5, -3.0]]], jnp.bfloat16)
    g, beta = gates(a, b, A_log=jnp.array([0.0, 1.0]), dt_bias=jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(g[0, 0], [-np.log(2), -np.e * np.log1p(np.exp(2.0))], rtol=1e-6)
    assert (g.dtype, beta.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(beta[0, 0].astype(np.float32), [0.6225, 0.0474], rtol=4e-3)


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "name", "reason"),
    [
        ((9, 0), jnp.bfloat16, 128, "triton", "documents run in parallel"),
        (None, jnp.bfloat16, 128, "chunked", "no NVIDIA GPU"),
        ((10, 0), jnp.bfloat16, 128, "chunked", "checked on compute capability 9.0 alone, got 10.0"),
        ((9, 0), jnp.float32, 128, "chunked", "dtype must be bfloat16 or float16"),
        ((9, 0), jnp.bfloat16, 256, "chunked", "head dims must be of"),
    ],
)
def test_kernels_serve_hopper_and_chunks_every_device(capability, dtype, dim, name, reason):
    pytest.importorskip("jax_triton")
    choice = DELTA_RULE.choose(capability, DeltaCall(dtype=jnp.dtype(dtype), key_dim=dim, value_dim=128))
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((1, 8, 2 * K * H + N * V + 1))}, "qkv must be"),
        ({"heads": DeltaHeads(K, 3, H)}, "value heads must be a multiple of key heads, got 3 and 2"),
        ({"g": jnp.zeros((1, 8, N), jnp.bfloat16)}, "g float32"),
        ({"segments": pack_segments([[9]], seq_len=9)}, "segments are of rows"),
        ({"segments": pack_forks([[(4, 2, 2)]], seq_len=8)}, "segments fork"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    *values, g, beta = arguments(1, 8)
    call = {"qkv": joined(*values), "g": g, "beta": beta, "heads": HEADS}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{**call, "segments": pack_segments([[8]], seq_len=8), **change})
