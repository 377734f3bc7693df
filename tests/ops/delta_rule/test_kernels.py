"""The delta rule's kernels against the reference in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.delta_rule.reference import reference_delta_rule
from jaxglue.ops.segments import pack_segments
from tests.closeness import assert_close, outputs_and_gradients

ROWS = {
    "uneven": [[5, 1, 1, 23, 90, 2, 17, 1], [1, 15, 16, 32, 64]],
    "one token each": [[1] * 70],
    "boundaries at chunks": [[32, 64, 32]],
    "one document": [[100]],
}


def arguments(B, T, K, N, H, V, seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 5)
    q, k = (2 * jax.random.normal(key, (B, T, K, H), dtype) for key in keys[:2])
    v = jax.random.normal(keys[2], (B, T, N, V), dtype)
    g = -jnp.exp(jax.random.uniform(keys[3], (B, T, N), minval=-7.0, maxval=1.0))
    return q, k, v, g, jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, N)))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_interpreted_kernels_equal_the_scan(rows, interpreted):
    from jaxglue.ops.delta_rule.triton import DeltaTiles, Tiles, TritonDeltaRule
    from jaxglue.ops.delta_rule.vjp import DeltaSpec, fused_delta_rule

    K, N, H, V = 1, 2, 16, 32
    T = max(map(sum, rows)) + 3
    segments, values = pack_segments(rows, seq_len=T), arguments(len(rows), T, K, N, H, V)
    tile = Tiles(columns=16)
    tiles = DeltaTiles(state=tile, output=tile, state_gradient=tile, gradient=tile)
    backend = interpreted(TritonDeltaRule)(compute_capability=90, tiles=tiles, chunk=32)
    cotangent = jax.random.normal(jax.random.key(9), values[2].shape)

    def kernels(q, k, v, g, beta):
        qkv = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in (q, k, v)], axis=-1)
        return fused_delta_rule(DeltaSpec(backend=backend, heads=(K, N, H)), qkv, g, beta, segments)

    got = outputs_and_gradients(kernels, values, cotangent)
    expected = outputs_and_gradients(lambda *values: reference_delta_rule(*values, segments), values, cotangent)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dg", "dbeta"), got, expected, strict=True):
        print(name, np.linalg.norm(a - b) / np.linalg.norm(b))
    assert_close(got[:1], expected[:1], 1e-5)
    assert_close(got[1:], expected[1:], 1e-4)
