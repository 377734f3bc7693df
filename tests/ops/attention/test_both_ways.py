"""Segments whose tokens see those after them, too: outputs and gradients equal attention by a dense mask."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.attention import packed_attention
from jaxglue.ops.attention.reference import reference_attention
from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles
from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.segments import both_ways, pack_segments
from tests.ops.attention.test_parity import assert_close, output_and_gradients

LENGTHS, T, N, K, H = [[17, 3, 1, 30], [40, 24]], 64, 2, 1, 16


def make_segments():
    return replace(pack_segments(LENGTHS, seq_len=T), bidirectional=True)


def dense_attention(q, k, v, segments, window):
    """Attend by a mask of equal segments, and of places at most half a window apart."""
    ids, at = np.asarray(segments.segment_ids), np.arange(T)
    visible = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]
    if window is not None:
        visible &= np.abs(at[:, None] - at) <= window // 2
    scores = jnp.einsum("btnh,bskh->bnts", q, k) * q.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    weights = jnp.where(visible.any(-1)[:, None, :, None], weights, 0)
    return jnp.einsum("bnts,bskh->btnh", weights, v)


def inputs(H=H):
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (2, T, heads, H)) for key, heads in zip(keys, (N, K, K, N), strict=True))


def with_gradients(function, q, k, v, dout):
    real = jnp.asarray(make_segments().segment_ids > 0)[:, :, None, None]

    @jax.jit
    def run(q, k, v, dout):
        out, vjp = jax.vjp(lambda *x: jnp.where(real, function(*x), 0), q, k, v)
        return out, *vjp(dout)

    return run(q, k, v, dout)


@pytest.mark.parametrize("window", [None, 8])
def test_reference_equals_a_dense_mask(window):
    segments = make_segments()
    found = with_gradients(partial(packed_attention, segments=segments, window=window), *inputs())
    wanted = with_gradients(partial(dense_attention, segments=segments, window=window), *inputs())
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


@pytest.mark.parametrize(
    ("sizes", "window", "late", "head_dim"),
    [
        ((16, 16), None, False, H),
        ((32, 16), 8, True, H),
        repeat((16, 32), 8, False, H),
        ((16, 32), None, False, 72),
        repeat((16, 32), None, True, 96),
    ],
)
def test_kernels_equal_a_dense_mask(interpreted_backend, sizes, window, late, head_dim):
    segments = jax.tree.map(jnp.asarray, make_segments())
    tiles = AttentionTiles(block_m=sizes[0], block_n=sizes[1], num_warps=4, num_stages=2, late=late)
    backend = interpreted_backend(
        tiles=AttentionKernelTiles(forward=tiles, dq=tiles, dkdv=tiles), compute_capability=80
    )
    spec = FlashSpec(backend=backend, window=None)
    bounds = both_ways(segments, window)
    found = with_gradients(lambda *x: flash_attention(spec, *x, None, bounds), *inputs(head_dim))
    wanted = with_gradients(partial(dense_attention, segments=segments, window=window), *inputs(head_dim))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


ROWS = {
    "uneven images": ((900, 1, 64, 1200, 223, 300), (7, 2600)),
    "an image to its end": ((64, 2624),),
    "one image and padding": ((1000,), (2500,)),
}
"""Patches of the images in rows of 2,688."""


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("name", ROWS)
def test_towers_match_the_reference_on_a_gpu(name, head_dim, backend):
    if backend == "hopper" and head_dim != 64:
        pytest.skip("no such heads")
    segments = jax.tree.map(jnp.asarray, replace(pack_segments(ROWS[name], seq_len=2688), bidirectional=True))
    shape = len(ROWS[name]), 2688, 4, head_dim
    q, k, v, dout = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))
    got = output_and_gradients(lambda *x: packed_attention(*x, segments, backend=backend), (q, k, v), dout)
    exact, bounds = tuple(x.astype(jnp.float32) for x in (q, k, v)), both_ways(segments, None)
    with jax.default_matmul_precision("highest"):
        expected = output_and_gradients(
            lambda *x: reference_attention(*x, bounds, window=None, sinks=None), exact, dout
        )
    assert_close(got, expected, dout, 1e-2)
