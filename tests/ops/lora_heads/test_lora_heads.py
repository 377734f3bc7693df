"""Heads between adapters by joined matmuls: kernels against separate operations."""

import jax
import jax.numpy as jnp
import pytest
from closeness import assert_close, outputs_and_gradients

from jaxglue.ops.lora import LORA
from jaxglue.ops.lora_heads import LORA_HEADS, lora_heads
from jaxglue.ops.norm_rope import HeadNorms, rotate_heads
from jaxglue.ops.rope import RopeConfig, rope_tables
from jaxglue.ops.segments import pack_segments

EPS, H = 1e-3, 16
# heads of queries and of keys, rank, norms
CASES = {"normed": (4, 2, 4, True), "not normed": (2, 2, 16, False), "odd numbers": (6, 3, 5, True)}


def random_case(name, dtype=jnp.float32, D=40):
    """Return ((x, frozen, adapters), cotangents) over uneven segments."""
    N, K, R, normed = CASES[name]
    segments = pack_segments([[5, 2, 4], [9]], seq_len=12)
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

    outs = [heads * H for heads in (N, K, K)]
    weights = [normal(out, D, scale=D**-0.5) for out in outs]
    norms = HeadNorms(1 + normal(H) / 4, 1 + normal(H) / 4, EPS) if normed else None
    downs = [normal(R, D, dtype=jnp.float32, scale=D**-0.5) for _ in outs]
    ups = [normal(out, R, dtype=jnp.float32, scale=R**-0.5) for out in outs]
    cotangents = tuple(normal(2, 12, heads, H) for heads in (N, K, K))
    tables = rope_tables(segments.positions, RopeConfig(), H)
    return (normal(2, 12, D), downs, ups), cotangents, (weights, norms, tables)


def joined(frozen):
    weights, norms, tables = frozen
    return lambda x, downs, ups: lora_heads(x, weights, downs, ups, *tables, norms=norms)


def by_definition(frozen):
    weights, norms, tables = frozen

    def heads(x, downs, ups):
        parts = zip(weights, downs, ups, strict=True)
        q, k, v = ((x @ w.T + x @ a.T @ b.T).reshape(*x.shape[:2], -1, H) for w, a, b in parts)
        return *rotate_heads(q, k, *tables, norms=norms, backend="reference"), v

    return heads


@pytest.fixture
def kernels(interpreted):
    """The kernels on the CPU with small tiles."""
    from jaxglue.ops.lora.tiles import GradientTiles
    from jaxglue.ops.lora.triton import TritonLora
    from jaxglue.ops.lora_heads.tiles import HeadTiles
    from jaxglue.ops.lora_heads.triton import TritonLoraHeads

    tiles, wide = HeadTiles(block_m=16, heads=2, rows=32), GradientTiles(block_m=16, block_n=64, columns=128)
    heads = interpreted(TritonLoraHeads)(compute_capability=90, rotate_tiles=tiles, gradient_tiles=tiles)
    lora = interpreted(TritonLora)(compute_capability=90, gradient_tiles=wide, product_tiles=wide)
    with LORA_HEADS.using(heads), LORA.using(lora):
        yield


@pytest.mark.parametrize("name", CASES)
def test_joined_heads_match_the_definition(kernels, name):
    arguments, cotangents, frozen = random_case(name)
    got = outputs_and_gradients(joined(frozen), arguments, cotangents)
    assert_close(got, outputs_and_gradients(by_definition(frozen), arguments, cotangents), 1e-5)


def test_trained_weights_and_norms_get_gradients(kernels):
    (x, downs, ups), cotangents, (weights, norms, tables) = random_case("odd numbers")

    def of(make):
        return lambda weights, norms: make((weights, norms, tables))(x, downs, ups)

    got, expected = (outputs_and_gradients(of(make), (weights, norms), cotangents) for make in (joined, by_definition))
    assert_close(got, expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_bf16_matches_float32_on_a_gpu(name):
    arguments, cotangents, frozen = random_case(name, jnp.bfloat16, 64)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arguments, cotangents, frozen))
    with jax.default_matmul_precision("highest"):
        expected = outputs_and_gradients(by_definition(wide[2]), *wide[:2])
    assert_close(outputs_and_gradients(joined(frozen), arguments, cotangents), expected, 1.5e-2)


def test_no_kernels_no_joining():
    (x, downs, ups), _, (weights, norms, tables) = random_case("normed")
    assert lora_heads(x, weights, downs, ups, *tables, norms=norms) is None
