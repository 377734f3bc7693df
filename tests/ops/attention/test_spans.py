"""Tokens of an image see each other, no later tokens of others, no other documents: every backend, both passes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.attention import packed_attention
from jaxglue.ops.attention.reference import reference_attention
from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles
from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.segments import pack_segments, within_window
from jaxglue.vision.rows import image_spans
from tests.ops.attention.test_parity import assert_close, output_and_gradients


def packed(lengths, images, T):
    """Return segments with spans, and the mask [T, T] by definition; `images` are (first token, tokens) in a row."""
    index = np.full((1, T), -1, np.int32)
    for number, (first, count) in enumerate(images):
        index[0, first : first + count] = sum(size for _, size in images[:number]) + np.arange(count)
    spans = image_spans(index, [[count for _, count in images]], [sum(lengths)])
    segments = replace(pack_segments([lengths], seq_len=T), **spans)
    ids = np.asarray(segments.segment_ids)[0]
    image = np.zeros(T, int)
    for number, (first, count) in enumerate(images, 1):
        image[first : first + count] = number
    q, k = np.indices((T, T))
    same = (image[:, None] == image[None]) & (image[:, None] > 0)
    return jax.tree.map(jnp.asarray, segments), (ids[:, None] == ids[None]) & (ids[:, None] > 0) & ((k <= q) | same)


def dense(q, k, v, mask):
    """Attention by its definition."""
    G = q.shape[2] // k.shape[2]
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, G, 2)) * q.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1) * mask.any(-1)[:, None]
    return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, G, 2))


def arrays(T, N, K, H, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, (1, T, n, H), dtype) for key, n in zip(keys, (N, K, K, N), strict=True))
    return (q, k, v, None), dout


SMALL = {
    "images at both ends of documents": ((20, 17), ((0, 6), (9, 11), (20, 1), (30, 7)), 40, None),
    "adjacent images": ((30,), ((2, 9), (11, 9), (20, 3)), 32, None),
    "longer than the window": ((11, 26), ((3, 5), (13, 19)), 40, 6),
    "in a window": ((11, 26), ((3, 3), (13, 4), (20, 9)), 40, 12),
    "texts alone": ((11, 20), (), 40, 5),
}


def masked(mask, window):
    q, k = np.indices(mask.shape)
    return mask if window is None else mask & (k > q - window)


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_and_interpreted_kernels_see_what_the_definition_says(name, interpreted_backend):
    lengths, images, T, window = SMALL[name]
    segments, mask = packed(lengths, images, T)
    inputs, dout = arrays(T, 4, 2, 16)
    expected = output_and_gradients(lambda q, k, v, _: dense(q, k, v, masked(mask, window)), inputs, dout)
    by_reference = output_and_gradients(
        lambda q, k, v, _: packed_attention(q, k, v, segments, window=window, backend="reference"), inputs, dout
    )
    assert_close(by_reference, expected, dout, 1e-5)
    tiles = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
    backend = interpreted_backend(
        tiles=AttentionKernelTiles(forward=tiles, dq=tiles, dkdv=tiles, dv=None), compute_capability=80
    )
    bounds, inside = within_window(segments, window)
    spec = FlashSpec(backend=backend, window=inside)
    got = output_and_gradients(lambda *x: flash_attention(spec, *x, bounds), inputs, dout)
    assert_close(got, expected, dout, 1e-5)


LARGE = {
    "Gemma 3": (8, 4, 256, None),
    "Gemma 3, window": (8, 4, 256, 1024),
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", LARGE)
def test_kernels_match_the_reference(name, backend):
    N, K, H, window = LARGE[name]
    lengths, T = (900, 1, 1400, 300), 2688
    images = ((100, 256), (400, 256), (901, 256), (1300, 256), (2301, 256))
    (q, k, v, _), dout = arrays(T, N, K, H, jnp.bfloat16)
    segments, _ = packed(lengths, images, T)
    got = output_and_gradients(
        lambda q, k, v, _: packed_attention(q, k, v, segments, window=window, backend=backend), (q, k, v, None), dout
    )
    exact = (*(x.astype(jnp.float32) for x in (q, k, v)), None)
    bounds, inside = within_window(segments, window)
    with jax.default_matmul_precision("highest"):
        expected = output_and_gradients(
            lambda q, k, v, _: reference_attention(q, k, v, bounds, window=inside, sinks=None), exact, dout
        )
    assert_close(got, expected, dout, 1e-2)
