"""Gradients of attention through the rotation of its queries and keys."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.attention import ATTENTION, Rotation, rotated_attention
from jaxglue.ops.attention.reference import reference_attention
from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles
from jaxglue.ops.norm_rope import HeadNorms, rotate_heads
from jaxglue.ops.segments import pack_forks, pack_segments

N, K, T = 2, 1, 36


@pytest.fixture(scope="module")
def rotation(interpreted):
    """Return random norms and angles of a row, for heads of a given dim."""
    from jaxglue.ops.norm_rope.triton import TritonNormRope

    def rotation(H):
        rng = np.random.default_rng(0)
        q_weight, k_weight = (jnp.asarray(rng.uniform(0.5, 2, H), jnp.float32) for _ in range(2))
        angles = jnp.asarray(rng.normal(size=(1, T, H // 2)), jnp.float32)
        norms = HeadNorms(q_weight=q_weight, k_weight=k_weight, eps=1e-6)
        kernels = interpreted(TritonNormRope)(compute_capability=80)
        return Rotation(kernels=kernels, heads=(N, K), norms=norms, cos=jnp.cos(angles), sin=jnp.sin(angles))

    return rotation


PACKED = pack_segments([[5, 1, 24]], seq_len=T)
FORKED = pack_forks([[(5, 9, 3), (0, 12, 1)]], seq_len=T)
CASES = {
    "norms and forks": (128, True, FORKED, None),
    "window": (128, False, PACKED, 7),
    "narrow heads": (24, True, PACKED, None),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_separate_operations(name, rotation, interpreted_backend):
    H, has_norms, segments, window = CASES[name]
    turned = rotation(H) if has_norms else replace(rotation(H), norms=None)
    z, dout = (jax.random.normal(jax.random.key(i), (1, T, heads, H)) for i, heads in enumerate((N + 2 * K, N)))
    segments = jax.tree.map(jnp.asarray, segments)

    def separate(z):
        q, k = rotate_heads(z[:, :, :N], z[:, :, N : N + K], turned.cos, turned.sin, norms=turned.norms)
        return reference_attention(q, k, z[:, :, -K:], segments, window=window, sinks=None)

    tile = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
    tiles = AttentionKernelTiles(forward=tile, dq=tile, dkdv=tile)
    with ATTENTION.using(interpreted_backend(tiles=tiles, compute_capability=80)):
        got = jax.jit(lambda z: jax.vjp(lambda z: rotated_attention(turned, z, segments, window=window), z)[1](dout))(z)
    (expected,) = jax.jit(lambda z: jax.vjp(separate, z)[1](dout))(z)
    assert np.linalg.norm(got[0] - expected) <= 1e-5 * np.linalg.norm(expected)
