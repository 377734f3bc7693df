"""Products of adapters side by side: kernels and matmuls against the definition."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, outputs_and_gradients
from selection import repeat

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.projection.lora import (
    LORA,
    LoraCall,
    lora_add,
    lora_expand,
    lora_expand_gradients_in_fp8,
    lora_shrink,
)
from jaxglue.ops.quant.fp8 import Quantizer

# rows, outputs, ranks; no tile divides the first two
CASES = [(37, (72, 20), (16, 16)), (40, (24,), (4,)), (5, (8, 100, 16), (3, 20, 1))]


def random_case(M, outputs, ranks, dtype=jnp.float32):
    """Return ((hidden, matrices), cotangents)."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + 2 * len(ranks)))
    hidden = jax.random.normal(next(keys), (1, M, sum(ranks)), dtype)
    matrices = [jax.random.normal(next(keys), shape) for shape in zip(outputs, ranks, strict=True)]
    return (hidden, matrices), [jax.random.normal(next(keys), (1, M, N), dtype) for N in outputs]


def by_definition(hidden, matrices):
    ends = np.cumsum([matrix.shape[1] for matrix in matrices])
    parts = jnp.split(hidden, ends[:-1], axis=-1)
    return [part @ matrix.T for part, matrix in zip(parts, matrices, strict=True)]


@pytest.fixture(params=["reference", "kernel"])
def backend(request):
    """Return the backend: None for the reference, or interpreted kernels with small tiles."""
    if request.param == "reference":
        return None
    interpreted = request.getfixturevalue("interpreted")
    from jaxglue.ops.projection.triton import GradientTiles, TritonLora

    tiles = GradientTiles(block_m=16, block_n=16, columns=32)
    return interpreted(TritonLora)(compute_capability=90, gradient_tiles=tiles, product_tiles=tiles)


@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients_match_the_definition(backend, case):
    arguments = random_case(*case)
    with LORA.using(backend):
        got = outputs_and_gradients(lora_expand, *arguments)
    assert_close(got, outputs_and_gradients(by_definition, *arguments), 1e-5)


@pytest.mark.parametrize(("M", "N", "R"), [(37, 72, 16), (5, 20, 3)])
def test_sums_and_gradients_match_the_definition(backend, M, N, R):
    (hidden, (matrix,)), (x,) = random_case(M, (N,), (R,))
    arguments = (x, jnp.flip(x, 1), hidden, matrix), jnp.cos(x)
    with LORA.using(backend):
        got = outputs_and_gradients(lora_add, *arguments)
    expected = outputs_and_gradients(lambda x, y, hidden, matrix: x + y + hidden @ matrix.T, *arguments)
    assert_close(got, expected, 1e-5)


def test_sums_are_rounded_once(interpreted):
    from jaxglue.ops.projection.triton import TritonLora

    (hidden, (matrix,)), (x,) = random_case(40, (24,), (4,), jnp.float16)
    y, matrix = 300 * jnp.flip(x, 1), 0.05 * matrix
    with LORA.using(interpreted(TritonLora)(compute_capability=90)):
        got = lora_add(x, y, hidden, matrix)
    wide = [array.astype(jnp.float32) for array in (x, y, hidden, matrix.astype(jnp.float16))]
    assert jnp.array_equal(got, (wide[0] + wide[1] + wide[2] @ wide[3].T).astype(jnp.float16))


def sums_and_their_parts(backend, dtype, stream: bool):
    """Return sums of one launch or of an adapter onto the stream, and the same by launches of their own."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
    M, R, factor, widths = 70, 8, 0.7, (96,) if stream else (96, 40, 130)
    low_rank = (3 * draw(0, M, R * len(widths))).astype(dtype)
    matrices = [draw(i + 1, N, R) for i, N in enumerate(widths)]
    products = [draw(i + 5, M, N).astype(dtype) for i, N in enumerate(widths)]
    x = draw(9, M, widths[0]).astype(dtype) if stream else None
    got = jax.jit(lambda *a: backend.sums(*a, [factor] * len(widths), x))(products, low_rank, matrices)
    if stream:
        return got, [jax.jit(backend.add_product)(x, products[0], low_rank, factor * matrices[0])]
    parts = [jax.jit(partial(backend.product, first=i * R))(low_rank, factor * m) for i, m in enumerate(matrices)]
    return got, [product + part for product, part in zip(products, parts, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_interpreted_sums_have_the_bits_of_launches_of_their_own(stream, interpreted):
    from jaxglue.ops.projection.triton import TritonLora

    kernels = interpreted(TritonLora)(compute_capability=90)
    for got, want in zip(*sums_and_their_parts(kernels, jnp.float16, stream), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [False, True])
def test_sums_have_the_bits_of_launches_of_their_own_on_a_gpu(stream):
    kernels = LORA.load(LoraCall(dtype=jnp.dtype(jnp.bfloat16), rank=8))
    for got, want in zip(*sums_and_their_parts(kernels, jnp.bfloat16, stream), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_sum_of_other_shapes_is_refused():
    (hidden, (matrix,)), (x,) = random_case(5, (20,), (3,))
    with pytest.raises(ValueError, match=r"low_rank \[..., R\] and matrix \[out, R\], got"):
        lora_add(x, x, hidden, matrix[:, :2])


def quantized_gradients(dtype, M=40, N=72, R=4):
    """Return (codes and gradients, the same by the reference) of one adapter."""
    (hidden, matrices), (dy,) = random_case(M, (N,), (R,), dtype)
    scales = jnp.abs(dy[0].astype(jnp.float32)).max(axis=-1, keepdims=True) / 300
    arguments = hidden[0], matrices, [dy[0]], [Quantizer(jnp.linspace(0.5, 1.5, N), scales)]
    got = lora_expand_gradients_in_fp8(*arguments)
    with LORA.using(None):
        return got, lora_expand_gradients_in_fp8(*arguments)


def assert_same_codes(got, expected):
    assert_close(*(jax.tree.leaves(part[:2]) for part in (got, expected)), 1e-2)
    codes, reference = (np.asarray(part[2][0].astype(jnp.float32)) for part in (got, expected))
    assert np.abs(reference).max() > 200
    np.testing.assert_allclose(codes, reference, rtol=0.13, atol=2**-8)


def test_cotangents_are_quantized_while_they_are_read(interpreted):
    from jaxglue.ops.projection.triton import GradientTiles, TritonLora

    tiles = GradientTiles(block_m=16, block_n=16, columns=32)
    with LORA.using(interpreted(TritonLora)(compute_capability=90, gradient_tiles=tiles)):
        got, expected = quantized_gradients(jnp.float32)
    codes, reference = (np.asarray(part[2][0].astype(jnp.float32)) for part in (got, expected))
    carried = jnp.where(2 * codes == reference, reference, codes)  # Triton 3.7.1's interpreter loses carries
    assert_same_codes((*got[:2], [carried]), expected)


@pytest.mark.gpu
def test_cotangents_are_quantized_on_a_gpu():
    assert_same_codes(*quantized_gradients(jnp.bfloat16, 1000, 3072, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (1000, (3072, 1000), (16, 16)), (300, (1536,), (64,))])
def test_bf16_matches_float32_on_a_gpu(case):
    arguments, cotangents = random_case(*case, jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arguments, cotangents))
    with jax.default_matmul_precision("highest"):
        expected = outputs_and_gradients(by_definition, *wide)
    assert_close(outputs_and_gradients(lora_expand, arguments, cotangents), expected, 1e-2)


@pytest.mark.parametrize("capability", [repeat((8, 0)), (9, 0)])
def test_only_kernels_write_wide_arrays(gpu_target, capability):
    # two adapters of one input
    M, D, N, R = 2048, 512, 1024, 16
    sharding = gpu_target(capability)

    def step(x, down, up, cotangents):
        products, pull = jax.vjp(lambda x, down, up: lora_expand(lora_shrink(x, down), up), x, down, up)
        return products, pull(cotangents)

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    narrow = [shaped(N, R, dtype=jnp.float32)] * 2
    arguments = shaped(M, D), shaped(2 * R, D, dtype=jnp.float32), narrow, [shaped(M, N)] * 2
    with tracing_for(capability):
        text = jax.jit(step, compiler_options=STEP_OPTIONS).lower(*arguments).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert program.count('custom_call_target="triton_kernel_call_ffi"') == 2 + 2
    assert not re.search(rf"bf16\[{M},{N}\]\S* (fusion|add|pad|dot)\(", program)


def test_ranks_that_do_not_add_up_are_refused():
    (hidden, matrices), _ = random_case(4, (8, 8), (2, 3))
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] must add up to the 4 columns"):
        lora_expand(hidden[..., :4], matrices)
