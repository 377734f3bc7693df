"""Attention over pages of latents: the reference against numpy, the kernel against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.paged_attention import LATENT_ATTENTION, latent_attention, make_latent_pages

PAGE, TURNING, RANK = 16, 8, 24


def random_case(N, positions, pages=4, dtype=jnp.float32):
    """Return (q, cache, tables, positions) of sequences that end at these positions."""
    rng, S = np.random.default_rng(0), len(positions)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    tables = 1 + rng.permutation(S * pages).reshape(S, pages).astype(np.int32)
    every = jnp.repeat(jnp.arange(S * pages + 1), PAGE), jnp.tile(jnp.arange(PAGE), S * pages + 1)
    cache = make_latent_pages(S * pages + 1, PAGE, TURNING + RANK, dtype)
    cache = cache.write(normal((S * pages + 1) * PAGE, TURNING + RANK), *every)
    return normal(S, N, TURNING + RANK), cache, jnp.asarray(tables), jnp.asarray(positions, jnp.int32)


ENDS = [0, PAGE - 1, PAGE, 3 * PAGE - 1, 50]
"""A single token, and page borders."""
OPTIONS = {"rank": RANK, "scale": 0.3}


def test_reference_matches_numpy():
    q, cache, tables, positions = random_case(3, ENDS)
    got = latent_attention(q, cache, tables, positions, **OPTIONS, backend="reference")
    for s, end in enumerate(ENDS):
        tokens = np.concatenate([np.asarray(cache.tokens[page]) for page in tables[s]])[: end + 1]
        weights = np.exp(0.3 * np.asarray(q[s]) @ tokens.T)
        want = weights / weights.sum(1, keepdims=True) @ tokens[:, TURNING:]
        np.testing.assert_allclose(got[s], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "programs"), [(5, 1), repeat(5, 264), (40, 264)])
def test_interpreted_attention_matches_the_reference(heads, programs, interpreted, monkeypatch):
    from jaxglue.ops.paged_attention import triton

    monkeypatch.setattr(triton, "_PROGRAMS", programs)  # with 1, one reads all pages
    monkeypatch.setattr(triton, "_COMBINED", 8)  # columns of a latent's sums are in two programs
    case = random_case(heads, ENDS)
    with LATENT_ATTENTION.using(interpreted(triton.TritonPagedAttention)(compute_capability=80)):
        got = latent_attention(*case, **OPTIONS)
    want = latent_attention(*case, **OPTIONS, backend="reference")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_attention_on_a_gpu_matches_the_reference(heads):
    rng, S, pages = np.random.default_rng(1), 3, 40
    tables = jnp.asarray(1 + rng.permutation(S * pages).reshape(S, pages), jnp.int32)
    cache = make_latent_pages(S * pages + 1, 64, 576, jnp.bfloat16)
    tokens = jnp.asarray(rng.standard_normal(cache.tokens.shape), jnp.bfloat16)
    case = jnp.asarray(rng.standard_normal((S, heads, 576)), jnp.bfloat16), type(cache)(tokens=tokens), tables
    ends, options = jnp.array([0, 1000, 64 * pages - 1]), {"rank": 512, "scale": 0.05}
    got, want = (latent_attention(*case, ends, **options, backend=backend) for backend in ("triton", "reference"))
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=3e-2, atol=3e-2)
