"""Projections of few rows: the interpreted kernel against products in float32, and what it compiles to."""

import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ptx import halves, run_assembly
from selection import repeat

from jaxglue.ops.backend import compute_capability, tracing_for
from jaxglue.ops.gated_mlp import GatedParts, gated_mlp
from jaxglue.ops.norm_rope import LLAMA_NORM, rms_norm
from jaxglue.ops.projection import LowRankAdapter, Projection, adapted_projection
from jaxglue.ops.projection.few_rows import FEW_ROWS, FewRowsCall, gate_few_rows, project_few_rows
from jaxglue.ops.projection.fp8 import dot_to_e4m3, encode
from jaxglue.ops.projection.fp8_adapters import NormedRows
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import is_quantized
from jaxglue.ops.quant.fp8 import quantize_fp8
from jaxglue.ops.quant.int8 import quantize_int8
from jaxglue.ops.quant.nf4 import VALUES, quantize_nf4
from jaxglue.ops.residual_norm import residual_norm


class Decoding(NamedTuple):
    """Conditions of decoding."""

    dropout_key: jax.Array | None = None
    fp8: bool = False
    inference: bool = True


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def projection(seed, N, K, *, rank=0, bias=False, quantize=lambda matrix: matrix):
    adapter = LowRankAdapter(A=draw(seed + 1, rank, K), B=draw(seed + 2, N, rank), scale=0.5 + seed) if rank else None
    weight = quantize(draw(seed, N, K))
    return Projection(weight=weight, bias=draw(seed + 3, N) if bias else None, adapter=adapter)


def product(x, part):
    """Return the product in float32."""
    weight = dequantize(part.weight, jnp.float32) if is_quantized(part.weight) else part.weight
    y = x @ weight.T
    if part.adapter is not None:
        y += part.adapter.scale * (x @ part.adapter.A.T) @ part.adapter.B.T
    return y if part.bias is None else y + part.bias


@pytest.fixture(scope="module")
def kernels(interpreted):
    from jaxglue.ops.projection.few_rows_triton import FewRowsTiles, TritonFewRows

    tiles = FewRowsTiles(block_n=16, block_k=16, num_warps=4, num_stages=1, programs=20)
    return interpreted(TritonFewRows)(compute_capability=90, tiles=tiles, plain=True)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize(
    ("M", "sizes", "K", "options"),
    [
        (5, (32,), 64, {}),
        (5, (32, 16, 16), 80, {"rank": 3, "bias": True}),
        repeat(16, (40, 24), 72, {"rank": 16}),
        repeat(1, (24,), 40, {"bias": True, "rank": 2}),
        (3, (32, 16), 64, {"quantize": quantize_int8, "rank": 4}),
        (3, (32, 16), 192, {"quantize": quantize_nf4, "rank": 4}),
        (3, (24,), 64, {"quantize": lambda matrix: replace(quantize_fp8(matrix), expand=True)}),
    ],
)
def test_interpreted_kernel_matches_products(M, sizes, K, options, kernels):
    parts, x = [projection(10 * i, N, K, **options) for i, N in enumerate(sizes)], draw(99, 1, M, K)
    with FEW_ROWS.using(kernels):
        got = adapted_projection(x, parts, Decoding())
    assert [y.shape for y in got] == [(1, M, N) for N in sizes]
    for y, part in zip(got, parts, strict=True):
        close(y, product(x, part))


@pytest.mark.parametrize("rank", [0, 3])
def test_interpreted_product_is_added_to_the_stream(rank, kernels):
    part, x, stream = projection(0, 32, 96, rank=rank), draw(99, 1, 4, 96), draw(98, 1, 4, 32)
    with FEW_ROWS.using(kernels):
        (got,) = adapted_projection(x, [part], Decoding(), stream=stream)
    close(got, stream + product(x, part))


@pytest.mark.parametrize(("activation", "rank"), [("silu", 3), repeat("gelu_tanh", 0)])
def test_interpreted_feed_forward_matches_its_formula(activation, rank, kernels):
    F, D = 40, 48
    parts = GatedParts(*(projection(10 * i, N, K, rank=rank) for i, (N, K) in enumerate([(F, D), (F, D), (D, F)])))
    x, stream = draw(99, 1, 5, D) / 8, draw(98, 1, 5, D)
    with FEW_ROWS.using(kernels):
        got = gated_mlp(x, parts, Decoding(), stream=stream, activation=activation)
    activate = jax.nn.silu if activation == "silu" else lambda gate: jax.nn.gelu(gate, approximate=True)
    close(got, stream + product(activate(product(x, parts.gate)) * product(x, parts.up), parts.down))


@pytest.fixture(scope="module")
def kernels_of_many(kernels):
    from jaxglue.ops.projection.few_rows_triton import ManyRowsTiles

    return replace(kernels, many=ManyRowsTiles(block_m=16, block_n=32, few=16, block_k=32))


@pytest.mark.parametrize(("M", "F", "D"), [(20, 40, 48), repeat(8, 48, 64)])
def test_interpreted_pairs_of_gate_and_up_match_the_formula(M, F, D, kernels_of_many):
    parts, x = [projection(10 * i, F, D) for i in range(2)], draw(99, 1, M, D) / 8
    got = gate_few_rows(kernels_of_many, x, parts, Decoding(), "silu")
    close(got, jax.nn.silu(product(x, parts[0])) * product(x, parts[1]))


@pytest.mark.parametrize("sizes", [(64, 32, 32), repeat((72,))])
def test_interpreted_products_of_many_rows_match_the_formula(sizes, kernels_of_many):
    parts, x = [projection(10 * i, N, 72) for i, N in enumerate(sizes)], draw(99, 1, 20, 72)
    with FEW_ROWS.using(kernels_of_many):
        got = adapted_projection(x, parts, Decoding())
    for y, part in zip(got, parts, strict=True):
        close(y, product(x, part))


@pytest.mark.parametrize(("dtype", "quantize"), [(jnp.float16, lambda matrix: matrix), (jnp.float32, quantize_fp8)])
def test_interpreted_kernels_of_many_rows_equal_those_of_few(dtype, quantize, kernels, kernels_of_many):
    """Without the rounding of products in float16, half of the gated bits would differ."""
    parts = [projection(i, 64, 64, quantize=lambda matrix: quantize(matrix.astype(dtype))) for i in (0, 10)]
    x, conditions = draw(99, 8, 64).astype(dtype) / 8, Decoding(fp8=True)
    own, others = (gate_few_rows(k, x, parts, conditions, "gelu_tanh") for k in (kernels_of_many, kernels))
    assert own.dtype == dtype and jnp.isclose(own, others, rtol=1e-5, atol=0).mean() > 0.99
    own, others = (project_few_rows(k, x, parts, conditions, None) for k in (kernels_of_many, kernels))
    for y, other in zip(own, others, strict=True):
        np.testing.assert_allclose(y, other, rtol=1e-3 if dtype == jnp.float16 else 1e-5, atol=1e-4)


def test_interpreted_products_are_rounded_where_training_rounds(kernels):
    """With adapters about as large as weights, half of the bits differ between the places of rounding."""
    x, stream = (draw(seed, 1, 8, 64).astype(jnp.float16) for seed in (99, 98))
    parts = [projection(10 * i, 64, 64, rank=4) for i in range(3)]
    halves = [replace(p, weight=p.weight.astype(jnp.float16), adapter=replace(p.adapter, scale=0.5)) for p in parts]
    rounded = lambda y: y.astype(jnp.float16)  # noqa: E731
    wide = lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32).T  # noqa: E731
    products = [rounded(wide(x, part.weight)) for part in halves]
    adapted = [wide(rounded(wide(x, rounded(p.adapter.A))), rounded(p.adapter.up)) for p in halves]
    with FEW_ROWS.using(kernels):
        several = adapted_projection(x, halves, Decoding())
        (onto,) = adapted_projection(x, halves[:1], Decoding(), stream=stream)
    for y, base, adapter in zip(several, products, adapted, strict=True):
        assert (y == base + rounded(adapter)).mean() > 0.99
    total = stream.astype(jnp.float32) + products[0].astype(jnp.float32) + adapted[0]
    assert (onto == rounded(total)).mean() > 0.99


def test_interpreted_gates_are_rounded_to_e4m3_where_training_rounds_them(kernels):
    parts = [projection(10 * i, 48, 64, rank=4, quantize=quantize_fp8) for i in range(2)]
    x = draw(99, 8, 64) / 8
    fp8_values, scales = encode(x)

    def rounded(part):
        values, factor = dot_to_e4m3(fp8_values, part.weight.values)
        adapted = part.adapter.scale * (x @ part.adapter.A.T) @ part.adapter.B.T
        return values.astype(jnp.float32) * (scales * factor) * part.weight.scales + adapted

    wanted = jax.nn.silu(rounded(parts[0])) * rounded(parts[1])
    alike, unlike = (
        jnp.isclose(gate_few_rows(own, x, parts, Decoding(fp8=True), "silu"), wanted, rtol=1e-3).mean()
        for own in (kernels, replace(kernels, rounds=False))
    )
    assert alike > 0.9 and unlike < 0.2, (alike, unlike)  # the interpreter rounds small values otherwise


@pytest.mark.parametrize("rank", [0, 4])
def test_norms_write_e4m3_values_for_interpreted_kernels(rank, kernels):
    parts = [projection(10 * i, N, 64, rank=rank, quantize=quantize_fp8) for i, N in enumerate((32, 16))]
    x, weight = draw(99, 1, 3, 64), draw(98, 64)
    with FEW_ROWS.using(kernels):
        stream, rows = residual_norm(x, weight, 1e-6, LLAMA_NORM, parts, Decoding(fp8=True))
        got = adapted_projection(rows, parts, Decoding(fp8=True))
    assert isinstance(rows, NormedRows) and stream is x
    for y, part in zip(got, parts, strict=True):
        want = product(rms_norm(x, weight, 1e-6), part)
        assert np.linalg.norm(y - want) < 0.06 * np.linalg.norm(want)


class Sharing(NamedTuple):
    """Conditions of decoding with adapters of several requests."""

    ranks: jax.Array
    dropout_key: jax.Array | None = None
    fp8: bool = True
    inference: bool = True


@pytest.mark.parametrize("quantize", [repeat(lambda matrix: matrix), repeat(quantize_int8), quantize_fp8])
def test_tokens_use_their_own_ranks_of_adapters(quantize):
    M, D, F = 5, 64, 32
    ranks = jnp.asarray(np.arange(6) // 2 == np.array([[0], [2], [1], [1], [7]]))  # the last one uses none
    parts = [projection(10 * i, n, k, rank=6, quantize=quantize) for i, (n, k) in enumerate([(F, D), (F, D), (D, F)])]
    x, stream = draw(99, 1, M, D) / 8, draw(98, 1, M, D)
    _, rows = residual_norm(x, jnp.ones(D), 1e-6, LLAMA_NORM, parts[:2], Sharing(ranks))
    assert isinstance(rows, jax.Array), "adapters read 16 bits"
    got = adapted_projection(rows, parts[:2], Sharing(ranks))
    fed = gated_mlp(rows, GatedParts(*parts), Sharing(ranks), stream=stream)
    for token, own in enumerate(ranks):
        alone = [replace(p, adapter=replace(p.adapter, A=p.adapter.A * own[:, None])) for p in parts]
        row, conditions = rows[:, token : token + 1], Decoding(fp8=True)
        for y, want in zip(got, adapted_projection(row, alone[:2], conditions), strict=True):
            np.testing.assert_allclose(y[:, token : token + 1], want, rtol=2e-4, atol=1e-3)
        want = gated_mlp(row, GatedParts(*alone), conditions, stream=stream[:, token : token + 1])
        difference = np.linalg.norm(fed[:, token : token + 1] - want) / np.linalg.norm(want)
        assert difference < (0.1 if quantize is quantize_fp8 else 1e-5)  # other values are rounded to e4m3 together


@pytest.mark.parametrize("quantize", [repeat(lambda matrix: matrix), repeat(quantize_int8), quantize_fp8])
def test_interpreted_kernels_use_own_ranks_of_each_row(quantize, kernels):
    """Alone, with its own ranks, each row has the same result to the bit."""
    M, D, F = 5, 64, 32
    ranks = jnp.asarray(np.arange(6) // 2 == np.array([[0], [2], [1], [1], [7]]))
    parts = [projection(10 * i, n, k, rank=6, quantize=quantize) for i, (n, k) in enumerate([(F, D), (F, D), (D, F)])]
    x, stream, weight = draw(99, 1, M, D) / 8, draw(98, 1, M, D), jnp.ones(D)
    with FEW_ROWS.using(kernels):
        _, rows = residual_norm(x, weight, 1e-6, LLAMA_NORM, parts[:2], Sharing(ranks))
        together = adapted_projection(rows, parts[:2], Sharing(ranks))
        together.append(gated_mlp(rows, GatedParts(*parts), Sharing(ranks), stream=stream))
        for token, own in enumerate(ranks):
            alone = [replace(p, adapter=replace(p.adapter, A=p.adapter.A * own[:, None])) for p in parts]
            _, row = residual_norm(x[:, token : token + 1], weight, 1e-6, LLAMA_NORM, alone[:2], Decoding(fp8=True))
            wanted = adapted_projection(row, alone[:2], Decoding(fp8=True))
            fed = gated_mlp(row, GatedParts(*alone), Decoding(fp8=True), stream=stream[:, token : token + 1])
            for y, want in zip(together, [*wanted, fed], strict=True):
                np.testing.assert_array_equal(y[:, token : token + 1], want)


def test_assembly_looks_up_every_nf4_code():
    pytest.importorskip("triton")
    from jaxglue.ops.projection.few_rows_kernels import NF4_ASSEMBLY

    scale = int(np.array(0.375, ml_dtypes.bfloat16).view(np.uint16)) * 0x10001
    values = np.array(VALUES, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32) * 0.375
    for first in range(0, 256, 4):
        codes = np.arange(first, first + 4) * 37 % 256  # neighbors differ in every bit
        words = run_assembly(
            NF4_ASSEMBLY.value, [int.from_bytes(codes.astype(np.uint8).tobytes(), "little"), scale, scale], 4
        )
        high, low = np.concatenate([halves(word) for word in words]).reshape(2, 4)
        np.testing.assert_array_equal(high, values[codes >> 4].astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(low, values[codes & 15].astype(ml_dtypes.bfloat16))


def test_training_takes_other_forms():
    part, x = projection(0, 32, 64), draw(99, 4, 64)
    with FEW_ROWS.using("not called"):
        (got,) = adapted_projection(x, [part], Decoding(inference=False))
    close(got, product(x, part))


OBSTACLES = {
    "more than 256 rows": (257, (0,)),
    "more than three weights": (4, (0, 0, 0, 0)),
    "only some projections have adapters": (4, (4, 0)),
    "adapters have several ranks": (4, (4, 5)),
    "rank must be at most 64": (4, (65, 65)),
    "cuBLAS is as fast for more than 128 rows": (200, (4, 4)),
    "cuBLAS is as fast for more than 64 rows": (100, (0,)),
}


def test_narrow_projections_and_quantized_ones_of_more_rows_are_served():
    def choose(parts):
        return FEW_ROWS.choose(
            (9, 0), FewRowsCall.of(jnp.zeros((200, 64), jnp.bfloat16), parts, Decoding(fp8=True))
        ).name

    assert choose([projection(i, 32, 64) for i in range(3)]) == "triton"
    assert choose([projection(0, 32, 64, quantize=quantize_int8)]) == "triton"
    assert choose([projection(0, 32, 64, quantize=quantize_nf4)]) == "reference"
    assert choose([projection(0, 32, 64, quantize=quantize_fp8)]) == "reference"
    assert choose([projection(0, 32, 64, rank=4, quantize=quantize_fp8)]) == "triton"


@pytest.mark.parametrize(
    ("rows", "quantize", "gated", "wide"),
    [
        (64, None, True, True),
        (200, None, False, True),
        (200, quantize_fp8, False, True),
        (300, None, False, False),
        (512, None, False, False),
        (512, quantize_fp8, True, True),
        (384, quantize_fp8, False, False),
        (513, quantize_fp8, False, False),
    ],
)
def test_many_rows_are_served_where_kernels_are_faster(rows, quantize, gated, wide):
    def serves(sizes, gated=False):
        weights = [jax.ShapeDtypeStruct((N, 4096), jnp.bfloat16) for N in sizes]
        parts = [Projection(weight=jax.eval_shape(quantize, w) if quantize else w) for w in weights]
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
        return FEW_ROWS.choose((9, 0), FewRowsCall.of(x, parts, Decoding(fp8=True), gated=gated)).name == "triton"

    assert (serves([12288, 12288], True), serves([4096, 1024, 1024])) == (gated, wide)
    assert rows < 65 or not serves([12288, 12288]), "other pairs are not"
    assert rows < 65 or not serves([14336, 14336], True), "nor what leaves multiprocessors idle in its second turn"
    assert rows < 300 or not serves([4096, 1000, 1048]), "nor blocks of two weights"


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_other_gpus_take_other_forms(capability):
    choice = FEW_ROWS.choose(
        capability, FewRowsCall.of(jnp.zeros((4, 64), jnp.bfloat16), [projection(0, 32, 64)], Decoding())
    )
    assert choice.name == "reference" and "compute capability" in choice.reason


@pytest.mark.parametrize("reason", OBSTACLES)
def test_obstacles_are_named(reason):
    M, ranks = OBSTACLES[reason]
    parts = [projection(10 * i, 32, 64, rank=rank) for i, rank in enumerate(ranks)]
    choice = FEW_ROWS.choose((9, 0), FewRowsCall.of(jnp.zeros((M, 64), jnp.bfloat16), parts, Decoding()))
    assert reason in choice.reason


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("quantize", [lambda matrix: matrix, quantize_fp8, quantize_int8, quantize_nf4])
def test_kernels_match_products_on_a_gpu(quantize, rank):
    K, x, conditions = 1024, draw(99, 1, 48, 1024).astype(jnp.bfloat16), Decoding(fp8=quantize is quantize_fp8)
    half = lambda matrix: quantize(matrix.astype(jnp.bfloat16))  # noqa: E731
    for sizes in ((1024, 256, 256), (640,)):
        parts = [projection(10 * i, N, K, rank=rank, quantize=half) for i, N in enumerate(sizes)]
        assert FEW_ROWS.choose(compute_capability(), FewRowsCall.of(x, parts, conditions)).name != "reference"
        with jax.default_matmul_precision("highest"):
            wanted = [product(x.astype(jnp.float32), part) for part in parts]
        for y, want in zip(adapted_projection(x, parts, conditions), wanted, strict=True):
            difference = np.linalg.norm(np.asarray(y, np.float32) - want) / np.linalg.norm(want)
            assert difference < (0.05 if conditions.fp8 else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [lambda matrix: matrix, quantize_fp8])
@pytest.mark.parametrize(("M", "sizes"), [(100, (1312, 1312)), (200, (1312, 1312)), (500, (1024, 256, 256))])
def test_kernels_of_many_rows_match_products_on_a_gpu(M, sizes, quantize):
    from jaxglue.ops.projection.few_rows_triton import TritonFewRows

    x, conditions = draw(99, M, 1024).astype(jnp.bfloat16), Decoding(fp8=quantize is quantize_fp8)
    half = lambda matrix: quantize(matrix.astype(jnp.bfloat16))  # noqa: E731
    parts = [projection(10 * i, N, 1024, quantize=half) for i, N in enumerate(sizes)]
    kernels = TritonFewRows.of(compute_capability())
    with jax.default_matmul_precision("highest"):
        wanted = [product(x.astype(jnp.float32), part) for part in parts]
    if len(sizes) == 2:
        wanted, got = [jax.nn.silu(wanted[0]) * wanted[1]], [gate_few_rows(kernels, x, parts, conditions, "silu")]
    else:
        got = project_few_rows(kernels, x, parts, conditions, None)
    for y, want in zip(got, wanted, strict=True):
        difference = np.linalg.norm(np.asarray(y, np.float32) - want) / np.linalg.norm(want)
        assert difference < (0.07 if conditions.fp8 else 0.01)


def test_parts_of_adapters_inputs_fit_beside_the_tiles():
    pytest.importorskip("jax_triton")
    from jaxglue.ops.projection.few_rows_triton import FewRowsTiles, steps_of_part

    tiles = FewRowsTiles(block_n=64, block_k=128, num_warps=4, num_stages=4, programs=132)
    assert steps_of_part(96, tiles, 128, 1, 16) == 24  # four places are left
    assert steps_of_part(96, tiles, 128, 1, 64) == 4  # these would take longer than the tiles
    assert steps_of_part(32, tiles, 96, 3, 16) == 4  # twelve for each, but parts of 512 columns
    assert steps_of_part(32, tiles, 131, 3, 16) == 4  # none


def test_kernel_compiles_for_a_gpu(h200):
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=h200)  # noqa: E731
    exact = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=h200)  # noqa: E731

    def project(x, weights, downs, ups):
        parts = [
            Projection(weight=W, adapter=LowRankAdapter(A=A, B=B)) for W, A, B in zip(weights, downs, ups, strict=True)
        ]
        return adapted_projection(x, parts, Decoding())

    M, D, sizes = 64, 1024, (1024, 256, 256)
    weights, downs, ups = [half(N, D) for N in sizes], [exact(16, D)] * 3, [exact(N, 16) for N in sizes]
    with tracing_for((9, 0)):
        program = jax.jit(project).lower(half(1, M, D), weights, downs, ups).compile()
    assert program.as_text().count("triton_kernel_call_ffi") == 1


@pytest.fixture
def compiled(monkeypatch):
    """Return a list of what Triton compiles meanwhile."""
    pytest.importorskip("jax_triton")
    from jaxglue.ops.launch import triton_lib

    compile, found = triton_lib.compile_ttir_inplace, []

    def noted(*args, **options):
        found.append(compile(*args, **options))
        return found[-1]

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", noted)
    return found


def lower(sharding, sizes, conditions, M, K, *, quantize=lambda matrix: matrix, rank=0):
    """Lower projections of M rows, or gate and up of two, for an H200."""
    half, exact = ((lambda *shape, dtype=d: jax.ShapeDtypeStruct(shape, dtype)) for d in (jnp.bfloat16, jnp.float32))
    adapters = [(exact(rank, K), exact(N, rank)) if rank else None for N in sizes]
    inputs = half(1, M, K), [jax.eval_shape(quantize, half(N, K)) for N in sizes], adapters
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), inputs)

    def project(x, weights, adapters):
        made = [None if adapter is None else LowRankAdapter(A=adapter[0], B=adapter[1]) for adapter in adapters]
        parts = [Projection(weight=weight, adapter=adapter) for weight, adapter in zip(weights, made, strict=True)]
        if len(parts) == 2:
            return gate_few_rows(
                FEW_ROWS.load(FewRowsCall.of(x, parts, conditions, gated=True)), x, parts, conditions, "silu"
            )
        return adapted_projection(x, parts, conditions)

    with tracing_for((9, 0)):
        jax.jit(project).lower(*shapes)


@pytest.mark.parametrize(("rows", "rank"), [(256, 16), repeat(256, 64), repeat(128, 64)])
def test_steps_of_an_adapter_beside_e4m3_values_fit_shared_memory(rows, rank, h200, compiled):
    lower(h200, [1024], Decoding(fp8=True), rows, 2048, quantize=quantize_fp8, rank=rank)
    assert compiled and max(kernel.shared_mem_bytes for kernel in compiled) <= 232_448


@pytest.mark.parametrize("sizes", [[12288] * 2, repeat([4096, 1024, 1024])])
def test_steps_of_many_rows_fit_shared_memory(sizes, h200, compiled):
    lower(h200, sizes, Decoding(fp8=True), 512, 512, quantize=quantize_fp8)
    assert compiled[-1].name == ("gate_rows_kernel" if len(sizes) == 2 else "many_rows_kernel")
    assert compiled[-1].shared_mem_bytes <= 232_448


@pytest.mark.parametrize("quantize", [quantize_int8, repeat(quantize_nf4)])
def test_matmuls_end_before_registers_take_the_next_weights(quantize, h200, compiled):
    lower(h200, [8448] * 2, Decoding(), 64, 512, quantize=quantize)
    waits = re.findall(r"wgmma.wait_group.sync.aligned\s+(\d+)", compiled[-1].binary)
    assert waits and set(waits) == {"0"}
