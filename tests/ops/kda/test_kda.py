"""Kimi Delta Attention by chunks against the scan in float32, and a document against its neighbors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats, repeats_parts_of, thorough

from jaxglue.ops.backend import compute_capability, tracing_for
from jaxglue.ops.delta_rule import DeltaHeads
from jaxglue.ops.kda import KDA, KDAWeights, channel_decays, kda_recurrence, kimi_delta_attention, reference_kda
from jaxglue.ops.kda.chunks import ChunkedKDA
from jaxglue.ops.recurrence import recur
from jaxglue.ops.segments import pack_segments
from tests.closeness import assert_close, outputs_and_gradients

HEADS, V = DeltaHeads(2, 2, 16), 16
WIDTH = 3 * 32
ROWS = {
    "uneven": [[5, 1, 1, 23, 90, 2, 17, 1], [1, 15, 16, 32, 64]],
    "one token each": [[1] * 70],
    "boundaries at chunks": [[32, 64, 32]],
    "around chunk, block and convolution": [[31, 33, 3, 5, 65, 63, 4, 7, 9]],
}


def arguments(B, T):
    """qkv with keys much alike, decays from 1 to e⁻¹⁰⁰, β."""
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = jax.random.normal(keys[0], (B, T, WIDTH)) + jax.random.normal(keys[1], (WIDTH,))
    g = -jnp.exp(jax.random.uniform(keys[2], (B, T, 2, 16), minval=-7.0, maxval=4.6))
    return qkv, g, jax.random.uniform(keys[3], (B, T, 2))


def cotangents(values):
    return jax.random.normal(jax.random.key(9), (*values[2].shape, V))


def compute(rule, values, segments):
    with KDA.using(rule):
        return outputs_and_gradients(
            lambda *values: kimi_delta_attention(*values, segments, HEADS), values, cotangents(values)
        )


def interpreted_rule(interpreted):
    from jaxglue.ops.delta_rule.triton import DeltaKernelTiles
    from jaxglue.ops.kda.triton import TritonKDA

    tile = DeltaKernelTiles(columns=8)
    tiles = dict.fromkeys(("state", "output", "state_gradient", "gradient"), tile)
    return interpreted(TritonKDA)(compute_capability=90, chunk=32, **tiles)


@pytest.fixture(params=["chunked", repeat("kernels")])
def rule(request, interpreted):
    """A rule of chunks of 32 tokens."""
    return ChunkedKDA(chunk=32, block=8, group=2) if request.param == "chunked" else interpreted_rule(interpreted)


@pytest.mark.parametrize("case", repeats(ROWS, "uneven", "one token each", "boundaries at chunks"))
def test_chunks_equal_the_scan(case, rule):
    rows = ROWS[case]
    T = max(map(sum, rows)) + 3
    segments, values = pack_segments(rows, seq_len=T), arguments(len(rows), T)
    expected = outputs_and_gradients(
        lambda *values: reference_kda(*values, segments, HEADS), values, cotangents(values)
    )
    got = compute(rule, values, segments)
    assert_close(got, expected, 1e-5)
    padding = segments.segment_ids == 0
    assert not any(np.any(x[padding]) for x in got)


def test_interpreted_kernels_equal_the_scan(interpreted):
    lengths = [[5, 68, 1]]
    segments, values = pack_segments(lengths, seq_len=75), arguments(1, 75)
    expected = outputs_and_gradients(
        lambda *values: reference_kda(*values, segments, HEADS), values, cotangents(values)
    )
    assert_close(compute(interpreted_rule(interpreted), values, segments), expected, 1e-5)


@repeats_parts_of("test_chunks_equal_the_scan")
def test_no_bit_depends_on_a_neighbor(rule):
    """Outputs and gradients of two documents, each in chunks and blocks of others whose values change."""
    rows, own = [[20, 30, 7, 40]], np.r_[20:50, 57:97]
    segments, values = pack_segments(rows, seq_len=97), arguments(1, 97)
    others = np.setdiff1d(np.arange(97), own)
    changed = [x.at[:, others].multiply(0.7) for x in values]
    before, after = (compute(rule, tuple(each), segments) for each in (values, changed))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, own], b[:, own])
        assert np.any(a[:, others] != b[:, others])


def test_one_decay_for_all_channels_is_the_delta_rule(rule):
    from jaxglue.ops.delta_rule import gated_delta_rule

    segments, (qkv, g, beta) = pack_segments([[20, 41, 3]], seq_len=64), arguments(1, 64)
    expected = gated_delta_rule(qkv, g[..., 0], beta, segments, HEADS)
    with KDA.using(rule):
        got = kimi_delta_attention(qkv, jnp.broadcast_to(g[..., :1], g.shape), beta, segments, HEADS)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("least", [repeat(None), -5.0])
def test_steps_continue_a_document(least):
    """Convolution and recurrence of a document's last tokens, from what remains of its first ones."""
    keys = jax.random.split(jax.random.key(3), 6)
    weights = KDAWeights(
        convolution=jax.random.normal(keys[0], (WIDTH, 1, 4)),
        A_log=jax.random.normal(keys[1], (2,)),
        dt_bias=jax.random.normal(keys[2], (32,)),
    )
    recurrence, T = kda_recurrence(weights, HEADS, least), 70
    values = [jax.random.normal(key, (1, T, n)) for key, n in zip(keys[3:], (WIDTH, 32, 2), strict=True)]
    expected, step = recur(recurrence, pack_segments([[T]], seq_len=T), *values), jax.jit(recurrence.step)
    for length in (1, 2, 3, 67):
        first = pack_segments([[length]], seq_len=T)
        states = jax.tree.map(lambda x: x[0, :1], recurrence.last(first, *values))
        for t in range(length, min(T, length + 5)):
            out, states = step(states, *(x[:, t] for x in values))
            np.testing.assert_allclose(out, expected[:, t], rtol=1e-5, atol=2e-5)


def test_a_safe_gate_is_at_least_its_bound():
    g = channel_decays(jnp.array([[[-90.0, 0.0, 90.0, 1.0]]]), jnp.zeros(2), jnp.zeros(4), -5.0)
    np.testing.assert_allclose(g[0, 0], [[0.0, -2.5], [-5.0, -5 / (1 + np.exp(-1))]], atol=1e-6)


@thorough("ops/kda/test_kda.py")
def test_kernels_compile_for_a_gpu(h200):
    """Five kernels of both passes: the backward pass reads what the forward pass kept."""
    heads, T = DeltaHeads(2, 2, 128), 512
    spec = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=h200)  # noqa: E731
    segments = pack_segments([[100, 300]], seq_len=T)

    def loss(qkv, g, beta):
        return jnp.sin(kimi_delta_attention(qkv, g, beta, segments, heads).astype(jnp.float32)).sum()

    values = spec(jnp.bfloat16, 1, T, 768), spec(jnp.float32, 1, T, 2, 128), spec(jnp.bfloat16, 1, T, 2)
    with tracing_for((9, 0)):
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*values).compile()
    assert program.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 5


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_follow_float32_on_a_gpu(dim):
    """And give the same bits again."""
    from jaxglue.ops.kda.triton import TritonKDA

    heads, rows = DeltaHeads(4, 4, dim), [[700, 1, 64, 200], [1, 2, 1000]]
    segments, keys = pack_segments(rows, seq_len=1024), jax.random.split(jax.random.key(0), 4)
    qkv = jax.random.normal(keys[0], (2, 1024, 12 * dim), jnp.bfloat16)
    g = -jnp.exp(jax.random.uniform(keys[1], (2, 1024, 4, dim), minval=-7.0, maxval=2.0))
    beta = jax.random.uniform(keys[2], (2, 1024, 4)).astype(jnp.bfloat16)
    dout = jax.random.normal(keys[3], (2, 1024, 4, dim), jnp.bfloat16)

    def both(rule, dtype):
        with KDA.using(rule):
            call = lambda qkv, g, beta: kimi_delta_attention(qkv, g, beta, segments, heads)  # noqa: E731
            return outputs_and_gradients(call, (qkv.astype(dtype), g, beta.astype(dtype)), dout.astype(dtype))

    kernels = TritonKDA.of(compute_capability())
    got, again = (both(kernels, jnp.bfloat16) for _ in range(2))
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(got, both(ChunkedKDA(), jnp.float32), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float32) - b) < 8e-3 * np.linalg.norm(b)
