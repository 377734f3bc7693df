"""Forked segments: continuations of one beginning equal documents that repeat it."""

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
from jaxglue.ops.segments import pack_forks, pack_segments

ROWS = {
    "long and short parts": ([(18, 3, 21), (1, 1, 1), (0, 9, 5)],),
    "parts on tile boundaries": ([(16, 16, 16), (16, 0, 0)], []),
    "a gap of several tiles": ([(5, 40, 15)],),
    "many continuations": ([(6, 7, 1, 20, 0, 11), (3, 2, 2, 2)], [(0, 30, 4, 25)]),
}
T, N, K, H = 64, 2, 1, 16


def copies(rows, x):
    """Return rows of a document for each continuation, from the forks' tokens [B, T, …]."""
    index = np.zeros((len(rows), 4 * T), np.int32)
    for b, row in enumerate(rows):
        start, taken = 0, []
        for shared, *continuations in row:
            beginning, begin = np.arange(start, start + shared), start + shared
            for size in continuations:
                taken += [beginning, np.arange(begin, begin + size)]
                begin += size
            start = begin
        taken = np.concatenate([*taken, np.zeros(0, np.int64)])
        index[b, : len(taken)] = taken
    return jnp.take_along_axis(x, jnp.asarray(index)[:, :, None, None], axis=1)


def forks_by_copies(rows, q, k, v, dout, window=None):
    """Return output and gradients by attention over the copies; a beginning's dout acts on its first copy alone."""
    lengths = [[s + size for s, *sizes in row for size in sizes if s + size] for row in rows]
    segments = pack_segments(lengths, seq_len=4 * T)

    def run(q, k, v):
        out = reference_attention(*(copies(rows, x) for x in (q, k, v)), segments, window=window, sinks=None)
        place = copies(rows, jnp.arange(T)[None, :, None, None] * jnp.ones((len(rows), 1, 1, 1)))[..., 0, 0]
        total = np.asarray(segments.segment_ids) > 0
        # the last copy of a token is written last; a beginning's copies are equal
        merged = jnp.zeros_like(q)
        b = jnp.arange(len(rows))[:, None]
        index = jnp.where(total, place.astype(jnp.int32), T)
        return jnp.pad(merged, ((0, 0), (0, 1), (0, 0), (0, 0))).at[b, index].set(out)[:, :T]

    return with_gradients(run, q, k, v, dout)


@partial(jax.jit, static_argnums=0)
def with_gradients(function, q, k, v, dout):
    out, vjp = jax.vjp(function, q, k, v)
    return out, *vjp(dout)


def inputs(rows):
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (len(rows), T, h, H)) for key, h in zip(keys, (N, K, K, N), strict=True))


def assert_close(got, expected, tolerance=2e-6):
    for a, b in zip(got, expected, strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * max(np.abs(np.asarray(b)).max(), 1)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("parts on tile boundaries", None),
        ("many continuations", None),
        ("long and short parts", 6),
        repeat("long and short parts", None),
        repeat("a gap of several tiles", None),
        repeat("many continuations", 6),
    ],
)
def test_reference_equals_two_documents(name, window):
    rows = ROWS[name]
    q, k, v, dout = inputs(rows)
    segments = pack_forks(rows, seq_len=T)
    got = with_gradients(partial(reference_attention, segments=segments, window=window, sinks=None), q, k, v, dout)
    assert_close(got, forks_by_copies(rows, q, k, v, dout, window))


@pytest.mark.parametrize(
    ("window", "late"),
    [repeat(None, False), (6, True), repeat(24, False), repeat(None, True), repeat(6, False), repeat(24, True)],
)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("a gap of several tiles", (32, 16)), repeat("long and short parts", (16, 32)), ("many continuations", (16, 16))],
)
def test_kernels_equal_the_reference(interpreted_backend, name, sizes, window, late):
    rows = ROWS[name]
    q, k, v, dout = inputs(rows)
    segments = jax.tree.map(jnp.asarray, pack_forks(rows, seq_len=T))
    tiles = AttentionTiles(block_m=sizes[0], block_n=sizes[1], num_warps=4, num_stages=2, late=late)
    backend = interpreted_backend(
        tiles=AttentionKernelTiles(forward=tiles, dq=tiles, dkdv=tiles), compute_capability=80
    )
    spec = FlashSpec(backend=backend, window=window)
    out, vjp = jax.vjp(lambda *x: flash_attention(spec, *x, None, segments), q, k, v)
    attention = partial(reference_attention, segments=segments, window=window, sinks=None)
    assert_close((out, *vjp(dout)), with_gradients(attention, q, k, v, dout), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, None), (256, None), (64, 128), (128, 100)])
def test_kernels_equal_the_reference_on_a_gpu(head_dim, window):
    rng = np.random.default_rng(0)
    forks = rng.integers(1, 400, (4, 3)).tolist()
    segments = jax.device_put(pack_forks([forks], seq_len=2560))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (1, 2560, heads, head_dim), jnp.bfloat16)
        for key, heads in zip(keys, (8, 2, 2, 8), strict=True)
    )

    @partial(jax.jit, static_argnums=(0, 1))
    def run(backend, dtype, inputs, dout):
        inputs = [x.astype(dtype) for x in inputs]
        out, vjp = jax.vjp(lambda *x: packed_attention(*x, segments, window=window, backend=backend), *inputs)
        return out, *vjp(dout.astype(dtype))

    got, expected = (run(*how, (q, k, v), dout) for how in [("triton", jnp.bfloat16), ("reference", jnp.float32)])
    for a, b in zip(got, expected, strict=True):
        a, b = np.float32(a), np.float32(b)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def test_positions_go_on_from_the_beginning():
    segments = pack_forks([[(2, 3, 2, 2)]], seq_len=10)
    assert segments.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 2, 3, 0]]
