"""Every backend against the float32 reference: output and all gradients, on uneven segments."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.attention import packed_attention
from jaxglue.attention.flash import FlashSpec, flash_attention
from jaxglue.attention.reference import reference_attention
from jaxglue.attention.tiles import KernelTiles, Tiles
from jaxglue.segments import pack_segments

# name: (lengths of the rows' documents, T, query heads, key/value heads, head dim, window, sinks)
CASES = {
    "ragged, two rows, padding": ([[5, 1, 1, 17, 30], [40, 3]], 64, 4, 2, 64, None, False),
    "one segment": ([[64]], 64, 2, 1, 64, None, False),
    "ends on tile boundaries": ([[16, 16, 32]], 64, 2, 2, 64, None, True),
    "window shorter than segments": ([[30, 3, 20]], 64, 4, 1, 64, 7, True),
    "window longer than segments": ([[30, 3, 20]], 64, 4, 1, 64, 50, False),
    "window of one token": ([[30, 3]], 48, 2, 1, 64, 1, True),
    "head dim 96, groups of 5, T is no multiple of a tile": ([[20, 31]], 51, 5, 1, 96, 9, False),
    "a row of padding": ([[33], []], 40, 2, 1, 64, None, True),
    "all documents have one token": ([[1] * 21], 24, 2, 1, 64, None, False),
}


def random_case(name, dtype=jnp.float32, seed=0):
    """(q, k, v, sinks, segments, dout, window) of a case."""
    lengths, T, N, K, H, window, with_sinks = CASES[name]
    keys = jax.random.split(jax.random.key(seed), 5)
    q, k, v, dout = (
        jax.random.normal(key, (len(lengths), T, heads, H), dtype)
        for key, heads in zip(keys[:4], (N, K, K, N), strict=True)
    )
    sinks = jax.random.normal(keys[4], (N,)) if with_sinks else None
    segments = jax.tree.map(jnp.asarray, pack_segments(lengths, seq_len=T))
    return q, k, v, sinks, segments, dout, window


def output_and_gradients(attention, q, k, v, sinks, dout):
    """(out, (dq, dk, dv, dsinks)) in float32."""
    out, pull = jax.vjp(attention, q, k, v, sinks)
    return jax.tree.map(lambda x: x.astype(jnp.float32), (out, pull(dout.astype(out.dtype))))


def assert_close(got, expected, dout, tolerance):
    """‖got − expected‖ ≤ tolerance·‖expected‖ for every array; one that should vanish is measured against dout."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = np.linalg.norm(b) or np.linalg.norm(dout)
        assert np.linalg.norm(a - b) <= tolerance * scale


def reference(segments, window, q, k, v, sinks):
    return reference_attention(q, k, v, segments, window=window, sinks=sinks, scale=q.shape[-1] ** -0.5)


@pytest.mark.parametrize("name", CASES)
def test_kernels_in_the_interpreter_match_the_reference(name, interpreted_backend):
    q, k, v, sinks, segments, dout, window = random_case(name)
    tiles = Tiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
    backend = interpreted_backend(tiles=KernelTiles(forward=tiles, dq=tiles, dkdv=tiles), compute_capability=90)
    spec = FlashSpec(backend=backend, window=window, scale=q.shape[-1] ** -0.5)
    fused = lambda q, k, v, sinks: flash_attention(spec, q, k, v, sinks, segments)  # noqa: E731
    got = output_and_gradients(fused, q, k, v, sinks, dout)
    expected = output_and_gradients(partial(reference, segments, window), q, k, v, sinks, dout)
    assert_close(got, expected, dout, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("backend", ["cudnn", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_backends_on_a_gpu_match_the_reference(name, backend, dtype):
    q, k, v, sinks, segments, dout, window = random_case(name, dtype)
    attention = jax.jit(
        lambda q, k, v, sinks: packed_attention(q, k, v, segments, window=window, sinks=sinks, backend=backend)
    )
    got = output_and_gradients(attention, q, k, v, sinks, dout)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        expected = output_and_gradients(partial(reference, segments, window), *exact, sinks, dout)
    assert_close(got, expected, dout, 1e-2)
