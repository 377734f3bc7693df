"""Products in one order: the interpreted kernel has the bits of sums of 16 columns after another, in any tiles."""

from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.ops import backend
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.gated_mlp import GatedParts, gated_mlp
from jaxglue.ops.projection import LowRankAdapter, Projection, adapted_projection, project
from jaxglue.ops.projection.ordered import ORDERED, adapted_products, ordered_product, ordered_products

STEP = 16


class Exact(NamedTuple):
    """Conditions of exact decoding."""

    ranks: jax.Array | None = None
    dropout_key: jax.Array | None = None
    fp8: bool = False
    inference: bool = True
    exact: bool = True


class Training(NamedTuple):
    """Conditions of training with exact sampling."""

    dropout_key: jax.Array | None = None
    fp8: bool = False
    exact: bool = True


def numbers(seed, rows, K):
    """Draw whole numbers times a power of two for each 16 columns: their sums are exact, and those of steps rounded."""
    rng = np.random.default_rng(seed)
    powers = np.exp2(np.random.default_rng(99).integers(-12, 12, -(-K // STEP)))
    return (rng.integers(-8, 9, (rows, K)) * np.repeat(powers, STEP)[:K]).astype(np.float32)


def whole(seed, rows, K):
    return np.random.default_rng(seed).integers(-8, 9, (rows, K)).astype(np.float32)


def in_steps(x, w, order=None):
    """Return x·wᵀ as float32 sums of steps of 16 columns, one after another, or in another order."""
    total = np.zeros((len(x), len(w)), np.float32)
    steps = range(0, x.shape[1], STEP)
    for step in steps if order is None else order(steps):
        total += x[:, step : step + STEP] @ w[:, step : step + STEP].T
    return total


@pytest.fixture(scope="module")
def kernels(interpreted):
    from jaxglue.ops.projection.ordered_triton import OrderedTiles, TritonOrdered

    def make(block_m, block_n, block_k=STEP):
        tiles = OrderedTiles(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=4, num_stages=1)
        return interpreted(TritonOrdered)(compute_capability=90, tiles=tiles)

    return make


@pytest.mark.parametrize(
    ("M", "sizes", "K", "tiles"),
    [
        (1, (32,), 64, (16, 16)),
        (37, (40, 16, 16, 6), 208, (16, 32)),
        repeat(512, (48, 24), 80, (64, 16)),
        repeat(200, (32, 32, 32), 72, (16, 16)),
        repeat(64, (24,), 400, (64, 64)),
    ],
)
def test_interpreted_kernel_has_the_bits_of_steps_in_order(M, sizes, K, tiles, kernels):
    x, weights = numbers(1, M, K), [whole(2 + i, N, K) for i, N in enumerate(sizes)]
    with ORDERED.using(kernels(*tiles)):
        products = ordered_products(jnp.asarray(x), list(map(jnp.asarray, weights)))
    for product, weight in zip(products, weights, strict=True):
        np.testing.assert_array_equal(product, in_steps(x, weight))


@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 20)])
def test_products_of_joined_matrices_are_side_by_side(sizes, kernels):
    x, weights = jnp.asarray(numbers(1, 21, 80)), [jnp.asarray(whole(2 + N, N, 80)) for N in (24, 40)]
    joined = [jnp.asarray(whole(9 + i, N, 80)) for i, N in enumerate(sizes)]
    wanted = [in_steps(np.asarray(x), np.asarray(weight)) for weight in (*weights, jnp.concatenate(joined))]
    with ORDERED.using(kernels(16, 16)):
        products = ordered_products(x, weights, joined=joined)
    for product, want in zip(products, wanted, strict=True):
        np.testing.assert_array_equal(product, want)


@pytest.mark.parametrize(("sizes", "K", "part"), [((24, 16), 208, 64), ((16,), 96, 96), ((16, 16, 16, 6), 200, 96)])
def test_parts_of_the_last_weights_sums_are_added_one_after_another(sizes, K, part, kernels):
    x, weights = numbers(1, 37, K), [whole(2 + i, N, K) for i, N in enumerate(sizes)]
    parts = [in_steps(x[:, first : first + part], weights[-1][:, first : first + part]) for first in range(0, K, part)]
    wanted = [*(in_steps(x, weight) for weight in weights[:-1]), reduce(np.add, parts)]
    assert len(parts) == 1 or (wanted[-1] != in_steps(x, weights[-1])).any()
    with ORDERED.using(kernels(16, 16)):
        products = ordered_products(jnp.asarray(x), list(map(jnp.asarray, weights)), part=part)
    for product, want in zip(products, wanted, strict=True):
        np.testing.assert_array_equal(product, want)
    last = ordered_products(jnp.asarray(x), list(map(jnp.asarray, weights)), part=part, backend="reference")[-1]
    np.testing.assert_allclose(last, wanted[-1], atol=1e-6 * np.abs(wanted[-1]).max())


def low_ranks_of(x, adapters, part, used):
    """Return x·Aᵀ of each adapter, whose sums are in parts, at the ranks that are used."""
    parts = [slice(first, first + part) for first in range(0, x.shape[1], part)]
    ranks = [reduce(np.add, (in_steps(x[:, own], a.A[:, own]) for own in parts)) for a in adapters]
    return ranks if used is None else [rank * used for rank in ranks]


@pytest.mark.parametrize(
    ("M", "sizes", "K", "tiles", "kind"),
    [
        (21, (40, 16), 80, (16, 16), "sums"),
        (21, (40,), 208, (32, 16), "stream in parts"),
        (37, (24, 24), 80, (16, 32), "activation"),
        repeat(1, (24, 24), 80, (16, 16), "activation"),
        repeat(37, (40, 16, 24), 208, (64, 64), "sums"),
    ],
)
def test_adapters_are_added_in_the_launch_of_their_weights(M, sizes, K, tiles, kind, kernels):
    x, stream, part = numbers(1, M, K), numbers(8, M, sizes[0]), 64 if kind == "stream in parts" else K
    weights = [whole(2 + i, N, K) / 2**20 for i, N in enumerate(sizes)]
    # An output takes one rank alone, so that no order of sums over ranks, which processors choose, changes a bit.
    ups = [whole(20 + i, N, 4) * (np.arange(N)[:, None] % 4 == np.arange(4)) for i, N in enumerate(sizes)]
    adapters = [LowRankAdapter(A=whole(9 + i, 4, K), B=up, scale=0.5) for i, up in enumerate(ups)]
    used = None if kind == "sums" else np.random.default_rng(3).integers(0, 2, (M, 4)) == 1
    added, activation = stream if kind == "stream in parts" else None, "silu" if kind == "activation" else None
    options = {"used": used, "stream": added, "activation": activation, "part": part if part < K else None}
    arrays = [[getattr(a, name) for a in adapters] for name in ("A", "B", "scale")]
    with ORDERED.using(kernels(*tiles)):
        got = adapted_products(*jax.tree.map(jnp.asarray, (x, weights)), *arrays, **options)
    low_ranks = low_ranks_of(x, adapters, part, used)
    wanted = [in_steps(x, w) + in_steps(low, 0.5 * a.B) for w, low, a in zip(weights, low_ranks, adapters, strict=True)]
    if kind == "stream in parts":
        wanted = [wanted[0] + stream]
    if kind == "activation":
        wanted = [np.asarray(jax.nn.silu(wanted[0]) * wanted[1])]
    for own, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
        assert kind == "activation" or np.array_equal(own, want)


def test_tiles_are_as_large_as_leaves_no_multiprocessor_idle(monkeypatch):
    pytest.importorskip("triton")
    from jaxglue.ops.projection.ordered_triton import ALONE_ROWS, CROWDED_ROWS, FEW_ROWS, MANY_ROWS, SOME_ROWS, tiles_of

    assert tiles_of(64, [4096, 16]) == tiles_of(1, [4096, 1024, 1024, 48]) == ALONE_ROWS
    assert tiles_of(2816, [4096, 16], in_parts=True) == tiles_of(64, [12288]) == FEW_ROWS
    assert tiles_of(2816, [4096, 16]) == tiles_of(256, [151936]) == MANY_ROWS
    assert [tiles_of(rows, [4096]) for rows in (65, 256, 512)] == [tiles for _, tiles in SOME_ROWS]
    assert tiles_of(64, [151936]) == CROWDED_ROWS
    monkeypatch.setattr(backend, "UNTRIED", {"crowded rows in one order"})
    assert tiles_of(64, [151936]) == FEW_ROWS


def test_gradients_are_those_of_the_plain_product(kernels):
    x, weight = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(1, 5, 48), (24, 48)]))
    dy = jax.random.normal(jax.random.key(2), (1, 5, 24))
    want, pull = jax.vjp(project, x, weight)
    with ORDERED.using(kernels(16, 16)):
        got, pull_ordered = jax.vjp(ordered_product, x, weight)
        gradients = pull_ordered(dy)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for own, other in zip(gradients, pull(dy), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_other_orders_have_other_bits():
    x, w = numbers(1, 37, 208), whole(2, 40, 208)
    assert (in_steps(x, w) != in_steps(x, w, reversed)).any()
    halves = in_steps(x[:, :104], w[:, :104]) + in_steps(x[:, 104:], w[:, 104:])
    assert (in_steps(x, w) != halves).any(), "a split sum"


@pytest.mark.parametrize(("dtype", "K"), [(jnp.float32, 300), (jnp.bfloat16, 512)])
def test_reference_gives_a_row_the_same_bits_among_any_rows(dtype, K):
    x, weights = (
        jax.random.normal(jax.random.key(0), (512, K), dtype),
        [jax.random.normal(jax.random.key(1 + N), (N, K), dtype) for N in (24, 64)],
    )
    many = ordered_products(x, weights, jnp.float32)
    for rows in (1, 2, 3, 17, 256):
        for few, all_rows in zip(ordered_products(x[:rows], weights, jnp.float32), many, strict=True):
            np.testing.assert_array_equal(few, all_rows[:rows])


def projection(seed, N, K, rank=4):
    draw = lambda key, *shape: jax.random.normal(jax.random.key(seed + key), shape)  # noqa: E731
    adapter = LowRankAdapter(A=draw(1, rank, K), B=draw(2, N, rank), scale=0.5) if rank else None
    return Projection(weight=draw(0, N, K).astype(jnp.bfloat16), adapter=adapter)


@pytest.mark.parametrize("rank", [4, repeat(0)])
def test_projections_and_feed_forward_of_few_rows_have_trainings_bits(rank):
    D, F, T = 48, 64, 96
    x, stream = (jax.random.normal(jax.random.key(seed), (1, T, D), jnp.bfloat16) for seed in (7, 8))
    heads, mlp = (
        [projection(10 * i, N, D, rank) for i, N in enumerate((48, 16, 16))],
        GatedParts(projection(40, F, D, rank), projection(50, F, D, rank), projection(60, D, F, rank)),
    )

    def run(x, stream, conditions):
        fed = gated_mlp(x, mlp, conditions, stream=stream)
        onto = adapted_projection(x, heads[:1], conditions, stream=stream)
        return [*adapted_projection(x, heads, conditions), *onto, fed]

    trained = jax.jit(lambda x, stream: run(x, stream, Training()))(x, stream)
    for rows in (2, 5, 64):
        few = jax.jit(lambda x, stream: run(x, stream, Exact()))(x[:, :rows], stream[:, :rows])
        for own, other in zip(few, trained, strict=True):
            np.testing.assert_array_equal(own, other[:, :rows])


def test_each_token_uses_its_own_ranks_with_the_bits_of_its_adapter_alone():
    D, F, T = 48, 64, 32
    x = jax.random.normal(jax.random.key(7), (1, T, D), jnp.bfloat16)
    mlp = GatedParts(projection(40, F, D, 32), projection(50, F, D, 32), projection(60, D, F, 32))
    ranks = jnp.asarray(np.arange(32) // 16 == np.arange(T)[:, None] % 2)
    together = gated_mlp(x, mlp, Exact(ranks=ranks), stream=x)
    for adapter in range(2):
        own = slice(16 * adapter, 16 * adapter + 16)
        alone = GatedParts(
            *(replace(p, adapter=replace(p.adapter, A=p.adapter.A[own], B=p.adapter.B[:, own])) for p in mlp)
        )
        want = gated_mlp(x, alone, Exact(), stream=x)
        np.testing.assert_array_equal(together[:, adapter::2], want[:, adapter::2])


def test_products_compile_in_one_launch(h200):
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=h200)  # noqa: E731
    weights = [shaped(4096, 4096), shaped(1024, 4096), shaped(1024, 4096), shaped(48, 4096)]
    for rows in (16, 256, 2048):
        with tracing_for((9, 0)):
            compiled = jax.jit(ordered_products).lower(shaped(rows, 4096), weights).compile()
        assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1


@pytest.mark.parametrize(("rows", "launches"), [(64, 1), repeat(512, 1), (1024, 2)])
def test_adapters_of_one_input_take_one_launch_more_at_most(rows, launches, h200):
    heads = [projection(10 * i, N, 256, 16) for i, N in enumerate((256, 128, 128))]
    arrays = [(p.weight, p.adapter.A, p.adapter.B) for p in heads]
    shaped = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=h200)  # noqa: E731

    def run(x, arrays):
        adapters = [LowRankAdapter(A=A, B=B, scale=0.5) for _, A, B in arrays]
        projections = [
            Projection(weight=own[0], adapter=adapter) for own, adapter in zip(arrays, adapters, strict=True)
        ]
        return adapted_projection(x, projections, Exact())

    x = jax.ShapeDtypeStruct((1, rows, 256), jnp.bfloat16, sharding=h200)
    with tracing_for((9, 0)):
        compiled = jax.jit(run).lower(x, jax.tree.map(shaped, arrays)).compile()
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == launches


def test_a_feed_forward_of_few_rows_takes_two_launches(h200):
    D, F = 256, 2304
    projections = [projection(10 * i, *shape, 16) for i, shape in enumerate(((F, D), (F, D), (D, F)))]
    arrays = [(p.weight, p.adapter.A.astype(jnp.bfloat16), p.adapter.B) for p in projections]
    shaped = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=h200)  # noqa: E731

    def run(x, arrays):
        adapters = [LowRankAdapter(A=A, B=B, scale=0.5) for _, A, B in arrays]
        own = [Projection(weight=w, adapter=a) for (w, _, _), a in zip(arrays, adapters, strict=True)]
        return gated_mlp(x, GatedParts(*own), Exact(), stream=x)

    x = jax.ShapeDtypeStruct((1, 64, D), jnp.bfloat16, sharding=h200)
    with tracing_for((9, 0)):
        text = jax.jit(run).lower(x, jax.tree.map(shaped, arrays)).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert program.count('custom_call_target="triton_kernel_call_ffi"') == 2
    assert " concatenate(" not in program


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 0])
def test_projections_and_feed_forward_of_few_rows_have_trainings_bits_on_a_gpu(rank):
    D, F, T = 1024, 3072 + 64, 16384
    x, stream = (jax.random.normal(jax.random.key(seed), (1, T, D), jnp.bfloat16) for seed in (7, 8))
    shapes = (F, D), (F, D), (D, F), (D, D)
    *mlp, onto = [projection(10 * i, N, K, rank) for i, (N, K) in enumerate(shapes)]
    scaled = [replace(p, weight=p.weight / 32) for p in mlp]

    def run(x, stream, conditions):
        fed = gated_mlp(x, GatedParts(*scaled), conditions, stream=stream)
        return fed, *adapted_projection(x, [onto], conditions, stream=stream)

    options = {"compiler_options": STEP_OPTIONS | {"xla_allow_excess_precision": False}}
    trained = jax.jit(lambda x, stream: run(x, stream, Training())).lower(x, stream).compile(**options)(x, stream)
    for rows in (1, 16, 64, 100, 256, 512, 1000):
        few = x[:, :rows], stream[:, :rows]
        sampled = jax.jit(lambda x, stream: run(x, stream, Exact())).lower(*few).compile(**options)(*few)
        for own, other in zip(sampled, trained, strict=True):
            np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(other[:, :rows], np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("N", "K", "dtype"),
    [(4096, 4096, jnp.bfloat16), (1024, 4096, jnp.bfloat16), (48, 4096, jnp.bfloat16), (32768, 4096, jnp.float32)],
)
def test_products_have_the_bits_of_cublas_products_of_many_rows(N, K, dtype):
    many = 16384 if dtype == jnp.bfloat16 else 1024
    x, weight = (jax.random.normal(jax.random.key(seed), (rows, K), jnp.bfloat16) for seed, rows in ((0, many), (1, N)))
    call = jax.jit(lambda x, weight: project(x, weight, dtype))
    trained = call.lower(x, weight).compile(compiler_options=STEP_OPTIONS)(x, weight)
    for rows in (1, 16, 64, 256, 512, 1024):
        (few,) = jax.jit(lambda x, weight: ordered_products(x, [weight], dtype))(x[:rows], weight)
        np.testing.assert_array_equal(np.asarray(few, np.float32), np.asarray(trained[:rows], np.float32))
