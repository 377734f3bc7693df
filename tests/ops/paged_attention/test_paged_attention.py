"""Attention over pages: the reference against numpy, the kernel against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.backend import tracing_for
from jaxglue.ops.paged_attention import PAGED_ATTENTION, paged_attention

PAGE = 16


def random_case(S, N, K, H, pages, dtype=jnp.float32):
    """Return (q, keys, values, tables, positions, sinks) of sequences that end anywhere in their pages."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    tables = 1 + rng.permutation(S * pages).reshape(S, pages).astype(np.int32)
    positions = rng.integers(0, pages * PAGE, S, dtype=np.int32)
    cache = normal(2, S * pages + 1, K, PAGE, H)
    return normal(S, N, H), *cache, jnp.asarray(tables), jnp.asarray(positions), 2 * normal(N)


def attend(case, backend, window, has_sinks):
    *operands, sinks = case
    out = paged_attention(*operands, window=window, sinks=sinks if has_sinks else None, backend=backend)
    return np.asarray(out, np.float32)


@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (20, True)])
def test_reference_matches_numpy(window, has_sinks):
    q, keys, values, tables, positions, sinks = case = random_case(S=3, N=4, K=2, H=8, pages=4)
    got = attend(case, "reference", window, has_sinks)
    for s, head in np.ndindex(3, 4):
        own = [np.concatenate([pool[page, head // 2] for page in tables[s]]) for pool in (keys, values)]
        seen = slice(max(0, positions[s] + 1 - (window or 1000)), positions[s] + 1)
        weights = np.exp(own[0][seen] @ q[s, head] / np.sqrt(8))
        want = weights @ own[1][seen] / (weights.sum() + has_sinks * np.exp(sinks[head]))
        np.testing.assert_allclose(got[s, head], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 4, 2, 16, 4), (2, 3, 1, 24, 5)])
@pytest.mark.parametrize(("window", "has_sinks", "programs"), [(None, False, 512), (20, True, 512), (40, True, 1)])
def test_interpreted_kernel_matches_the_reference(sizes, window, has_sinks, programs, interpreted, monkeypatch):
    from jaxglue.ops.paged_attention.triton import TritonPagedAttention

    monkeypatch.setattr("jaxglue.ops.paged_attention.triton._PROGRAMS", programs)  # with 1, one reads all pages
    case = random_case(*sizes)
    with PAGED_ATTENTION.using(interpreted(TritonPagedAttention)(compute_capability=80)):
        got = attend(case, "auto", window, has_sinks)
    np.testing.assert_allclose(got, attend(case, "reference", window, has_sinks), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 32, 8, 128, 40), (1, 64, 8, 64, 300), (5, 24, 8, 128, 33)])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (128, True)])
def test_kernel_matches_the_reference_on_a_gpu(sizes, window, has_sinks):
    half = random_case(*sizes, dtype=jnp.bfloat16)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, half)
    got, want = attend(half, "triton", window, has_sinks), attend(exact, "reference", window, has_sinks)
    assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)


def test_kernel_compiles_for_a_gpu(h200):
    case = random_case(S=4, N=32, K=8, H=128, pages=8, dtype=jnp.bfloat16)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200) for x in case]
    with tracing_for((9, 0)):
        program = jax.jit(lambda *case: paged_attention(*case[:-1], window=128, sinks=case[-1])).lower(*types).compile()
    assert program.as_text().count("custom-call(") == 1
