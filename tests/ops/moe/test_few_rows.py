"""Experts with few tokens: the interpreted kernel against the reference, and what it compiles to."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ptx import halves, matmuls_left_running, run_assembly
from selection import repeat, repeats_parts_of

from jaxglue.ops import backend
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.moe import (
    CHOOSE,
    FEW_ROWS_EXPERTS,
    ROUTE,
    ChooseCall,
    ExpertAdapter,
    ExpertLora,
    FewRowsExpertsCall,
    GroupMetadata,
    moe_mlp,
    route,
)
from jaxglue.ops.moe.routing import few_rows_tile
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.quant.mxfp4 import MXFP4, decode_e2m1, quantize_mxfp4
from jaxglue.ops.quant.stack import hold_matrices


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def uneven_logits(M, E):
    """Return logits of which the first expert gets no token, and others few or many."""
    return (draw(0, M, E) + jnp.asarray([0, 0, 1, -1])[jnp.arange(E) % 4]).at[:, 0].set(-100.0)


def adapters(E, D, F, ranks, chosen=None):
    """Return adapters of gate and up and of down, of these ranks, 0 for none; of which tokens use the chosen."""

    def adapter(seed, K, N, R):
        return ExpertAdapter(draw(seed, E, R, K) / K**0.5, draw(seed + 1, E, N, R)) if R else None

    return ExpertLora(
        gate_up=adapter(6, D, 2 * F, ranks[0]), down=adapter(8, F, D, ranks[1]), scales=(0.7, 1.1), ranks=chosen
    )


def case(M, E, k, D, F, *, transposed=True, stored=None, bias=False, activation="swiglu"):
    """Return the arguments of `moe_mlp`."""
    gate_up, down = (
        (draw(1, E, 2 * F, D) / 4, draw(2, E, D, F)) if transposed else (draw(1, E, D, 2 * F) / 4, draw(2, E, F, D))
    )
    if activation == "relu2":
        gate_up = draw(1, E, F, D) / 4
    if stored:
        quantize = quantize_mxfp4 if stored == "mxfp4" else partial(hold_matrices, FORMATS[stored])
        gate_up, down = quantize(gate_up), quantize(down)
    options = {"activation": activation, "transpose_rhs": transposed}
    if bias:
        options |= {"gate_up_bias": draw(3, E, 2 * F), "down_bias": draw(4, E, D)}
    routing = route(uneven_logits(M, E), k, normalize=True, inference=True)
    return (draw(5, M, D), routing, gate_up, down), options


def apply(arrays, options, lora=None, **how):
    """Return the layer's result, by one program."""
    return jax.jit(lambda *arrays: moe_mlp(*arrays, **options, lora=lora, **how))(*arrays)


@pytest.fixture(scope="module")
def kernels(interpreted):
    from jaxglue.ops.moe.few_rows import ExpertsTiles, TritonFewRowsExperts

    tiles = ExpertsTiles(block_n=32, block_k=32, num_warps=4, num_stages=1)
    return interpreted(TritonFewRowsExperts)(compute_capability=90, tiles=tiles, plain=True)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        repeat((5, 8, 2, 48, 40), {}),
        ((52, 4, 2, 64, 32), {"stored": "mxfp4", "activation": "gpt_oss", "bias": True}),  # tiles of 32, 48, 64
        repeat((3, 2, 1, 160, 32), {"stored": "mxfp4"}),
        repeat((90, 2, 1, 64, 64), {"stored": "nf4"}),  # two tiles of 64 rows for an expert
        repeat((9, 4, 2, 128, 64), {"stored": "nf4"}),
        ((9, 4, 2, 96, 64), {"stored": "fp8"}),
        repeat((3, 4, 2, 64, 32), {"stored": "int8", "activation": "geglu"}),
        repeat((9, 4, 2, 64, 48), {"activation": "relu2"}),
        ((9, 4, 2, 32, 32), {"exact": True}),
        ((3, 6, 2, 32, 48), {"transposed": False, "activation": "gpt_oss", "bias": True}),
    ],
)
def test_interpreted_kernels_match_the_reference(sizes, options, kernels):
    exact = {"exact": True} if options.get("exact") else {}
    arrays, options = case(*sizes, **{name: value for name, value in options.items() if name != "exact"})
    want = apply(arrays, options, backend="reference")
    with FEW_ROWS_EXPERTS.using(kernels):
        got = apply(arrays, options, inference=True, **exact)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("stored", [repeat("fp8"), "int8"])
def test_bytes_multiplied_in_float16_match_the_reference(stored, kernels):
    (x, *arrays), options = case(40, 2, 1, 64, 32, stored=stored)  # tiles of 48 rows
    arrays = x.at[3].multiply(1e9).at[4].multiply(1e-9).at[5].set(0), *arrays  # beyond float16
    want = apply(arrays, options, backend="reference")
    with FEW_ROWS_EXPERTS.using(replace(kernels, tiles=replace(kernels.tiles, half=True))):
        got = apply(arrays, options, inference=True)
    largest = jnp.abs(want).max(axis=1, keepdims=True)
    np.testing.assert_allclose(got / (largest + 1e-30), want / (largest + 1e-30), rtol=0, atol=1e-3)  # of 2⁻¹²
    assert not got[5].any() and bool(jnp.isfinite(got).all())


@pytest.mark.parametrize("stored", ["fp8", repeat("int8")])
def test_adapters_multiply_rows_that_float16_does_not_hold(stored, kernels):
    (x, *arrays), options = case(40, 2, 1, 64, 32, stored=stored)
    arrays, lora = (x.at[3].multiply(1e9).at[4].multiply(1e-9), *arrays), adapters(2, 64, 32, (4, 4))
    want = apply(arrays, options, lora, backend="reference")
    with FEW_ROWS_EXPERTS.using(replace(kernels, tiles=replace(kernels.tiles, half=True))):
        got = apply(arrays, options, lora, inference=True)
    largest = jnp.abs(want).max(axis=1, keepdims=True)
    np.testing.assert_allclose(got / largest, want / largest, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("sizes", "options", "ranks"),
    [
        repeat((5, 8, 2, 48, 40), {}, (4, 4)),
        ((52, 4, 2, 160, 32), {"stored": "mxfp4", "activation": "gpt_oss", "bias": True}, (4, 3)),  # tiles of 32 to 64
        ((9, 4, 2, 128, 64), {"stored": "nf4"}, (0, 16)),
        repeat((9, 4, 2, 96, 64), {"stored": "fp8"}, (20, 4)),
        repeat((3, 4, 2, 64, 32), {"stored": "int8", "activation": "geglu"}, (4, 0)),
        repeat((3, 6, 2, 32, 48), {"transposed": False, "activation": "gpt_oss", "bias": True}, (4, 4)),
    ],
)
@pytest.mark.parametrize("several", [repeat(False), True])
def test_interpreted_kernels_add_adapters(sizes, options, ranks, several, kernels):
    (M, E, _, D, F), (arrays, options) = sizes, case(*sizes, **options)
    chosen = jnp.asarray(np.random.default_rng(4).random((M, max(ranks))) < 0.5) if several and all(ranks) else None
    if chosen is not None:
        ranks = max(ranks), max(ranks)
    lora = adapters(E, D, F, ranks, chosen)
    want = apply(arrays, options, lora, backend="reference")
    with FEW_ROWS_EXPERTS.using(kernels):
        got = apply(arrays, options, lora, inference=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@repeats_parts_of("test_interpreted_kernels_add_adapters")
@pytest.mark.parametrize(
    ("stored", "wide", "K", "options"),
    [
        ("mxfp4", 256, 288, {"shrink_k": 256}),
        repeat("mxfp4", 512, 288, {}),
        ("nf4", 256, 320, {}),
        repeat("nf4", 512, 512, {}),
        (None, 32, 160, {"shrink_k": 64}),
    ],
)
def test_interpreted_kernels_read_more_of_a_row_in_a_step(stored, wide, K, options, interpreted):
    from jaxglue.ops.moe.few_rows import ExpertsTiles, TritonFewRowsExperts

    tiles = ExpertsTiles(block_n=32, block_k=wide, num_warps=4, num_stages=1, **options)
    kernels = interpreted(TritonFewRowsExperts)(compute_capability=90, tiles=tiles, plain=True)
    arrays, options = case(5, 3, 2, K, 64, stored=stored)
    lora = adapters(3, K, 64, (4, 4))
    want = apply(arrays, options, lora, backend="reference")
    with FEW_ROWS_EXPERTS.using(kernels):
        got = apply(arrays, options, lora, inference=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize(
    ("M", "E", "k", "order"), [(40, 6, 2, "softmax_topk"), (3, 8, 3, "topk_softmax"), repeat(70, 4, 4, "softmax_topk")]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_interpreted_routing_matches_the_sort(M, E, k, order, normalize, kernels):
    logits = draw(0, M, E).at[:, 1].set(-9.0).at[0].set(1.0)  # an expert without tokens, and equal scores
    want = route(logits, k, order=order, normalize=normalize)
    with ROUTE.using(kernels):
        got = route(logits, k, order=order, normalize=normalize, inference=True)
    tiles = GroupMetadata.of(want.groups.sizes, M * k, row_tile=few_rows_tile(M * k // E)).tiles
    tiles, rows = tiles.table, tiles.rows
    used = np.asarray(tiles[0] < E)
    for name in ("expert_ids", "permutation", "inverse"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5)
    np.testing.assert_array_equal(got.groups.sizes, want.groups.sizes)
    np.testing.assert_array_equal(got.groups.offsets, want.groups.offsets)
    np.testing.assert_array_equal(got.groups.tiles.table[:, used], tiles[:, used])
    np.testing.assert_array_equal(got.groups.tiles.table[0], tiles[0])
    assert got.groups.tiles.rows == rows


@pytest.mark.parametrize("order", ["softmax_topk", repeat("sigmoid_topk")])
def test_interpreted_choice_and_its_gradients_equal_the_sort(order, kernels):
    logits = draw(0, 12, 6).at[0].set(1.0)

    def weigh(logits):
        routing = route(logits, 2, order=order, normalize=True)
        return (routing.weights * jnp.asarray([1.0, -2.0])).sum(), routing.expert_ids

    (want, want_ids), want_gradient = jax.value_and_grad(weigh, has_aux=True)(logits)
    with CHOOSE.using(kernels):
        (got, got_ids), got_gradient = jax.value_and_grad(weigh, has_aux=True)(logits)
    np.testing.assert_array_equal(got_ids, want_ids)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_choice_on_a_gpu_equals_the_sort():
    scores = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (5000, 256)).astype(jnp.bfloat16)).astype(jnp.float32)
    np.testing.assert_array_equal(CHOOSE.load(ChooseCall(experts=256)).choose(scores, 8), jax.lax.top_k(scores, 8)[1])


def test_a_tile_of_few_rows_holds_twice_the_mean_group():
    logits = draw(0, 64, 8)
    routings = [route(logits, 2, order="sigmoid_topk", inference=inference) for inference in (False, True)]
    assert [routing.groups.tiles.rows for routing in routings] == [16, 32]
    assert [few_rows_tile(mean) for mean in (0, 3, 8, 9, 32, 40, 64)] == [16, 16, 16, 32, 64, 64, 64]


def test_assembly_decodes_every_mxfp4_code():
    pytest.importorskip("triton")
    from jaxglue.ops.moe.few_rows_kernels import MXFP4_ASSEMBLY

    exponent, order = 120, np.array([0, 4, 1, 5, 2, 6, 3, 7])
    for first in range(16):
        for step in range(16):
            codes = ((first + step * np.arange(8)) % 16).astype(np.uint8)
            word = int((codes.astype(np.uint32) << 4 * np.arange(8, dtype=np.uint32)).sum())
            got = run_assembly(MXFP4_ASSEMBLY.value, [word, (exponent + 126) * 0x800080], 8)
            want = decode_e2m1(jnp.asarray(codes))[order] * 2.0 ** (exponent - 127)
            np.testing.assert_array_equal([float(halves(value)[0]) for value in got], want)


def meaning(x, routing, matrices, options, adapters=(None, None)):
    rows, experts = routing.permutation.size, routing.group_sizes.shape[0]
    operands = {"matrices": tuple(matrices), "adapters": adapters}
    return FewRowsExpertsCall(dtype=x.dtype, rows=rows, experts=experts, **operands, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, "one", "several"])
@pytest.mark.parametrize(
    ("M", "stored"),  # 15 and 50 rows an expert
    [(60, None), *((M, stored) for M in (60, 200) for stored in ("mxfp4", "nf4", "fp8", "int8"))],
)
def test_kernels_match_the_reference_on_a_gpu(M, stored, lora):
    E, k, D, F = 16, 4, 512, 320
    if lora:
        chosen = jnp.asarray(np.random.default_rng(4).random((M, 24)) < 0.5)
        lora = adapters(E, D, F, (24, 24), chosen if lora == "several" else None)
    (x, routing, *matrices), options = case(M, E, k, D, F, stored=stored)
    if not stored:
        matrices = [matrix.astype(jnp.bfloat16) for matrix in matrices]
    of_rows = (None, None) if lora is None else lora.of_rows(routing)
    kernels = FEW_ROWS_EXPERTS.load(meaning(x.astype(jnp.bfloat16), routing, matrices, options, of_rows))
    assert kernels is not None
    with jax.default_matmul_precision("highest"):
        exact = [m if stored else m.astype(jnp.float32) for m in matrices]
        rows = x.astype(jnp.bfloat16).astype(jnp.float32)
        want = moe_mlp(rows, routing, *exact, **options, lora=lora, backend="reference")
    routed = route(uneven_logits(M, E), k, normalize=True)
    jax.tree.map(np.testing.assert_array_equal, routed.groups.sizes, routing.groups.sizes)
    np.testing.assert_array_equal(routed.permutation, routing.permutation)
    for each in (routing, routed, routing):  # counts of readers are zeros again after a launch
        got = moe_mlp(x.astype(jnp.bfloat16), each, *matrices, **options, lora=lora, inference=True)
        assert np.linalg.norm(np.asarray(got, np.float32) - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [None, "mxfp4", "nf4", "fp8"])
@pytest.mark.parametrize("M", [60, 200])
def test_other_tiles_match_the_reference_on_a_gpu(M, stored):
    from jaxglue.ops.moe.few_rows import TritonFewRowsExperts, fitting_tiles

    E, k, D, F = 16, 4, 512, 320
    chosen = jnp.asarray(np.random.default_rng(4).random((M, 24)) < 0.5)
    lora = adapters(E, D, F, (24, 24), chosen)
    (x, routing, *matrices), options = case(M, E, k, D, F, stored=stored)
    x = x.astype(jnp.bfloat16)
    if not stored:
        matrices = [matrix.astype(jnp.bfloat16) for matrix in matrices]
    with jax.default_matmul_precision("highest"):
        exact = [m if stored else m.astype(jnp.float32) for m in matrices]
        want = moe_mlp(x.astype(jnp.float32), routing, *exact, **options, lora=lora, backend="reference")
    kind = {None: "plain", "fp8": "bytes"}.get(stored, stored)
    tiles = fitting_tiles(kind, routing.groups.tiles.rows)
    for columns in (None, 128, 256):
        kernels = TritonFewRowsExperts.of((9, 0), tiles=replace(tiles, shrink_k=columns))
        with FEW_ROWS_EXPERTS.using(kernels):
            for _ in range(3):  # counts are zeros again after a launch
                got = moe_mlp(x, routing, *matrices, **options, lora=lora, inference=True)
                assert np.linalg.norm(np.asarray(got, np.float32) - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 16, 24])
@pytest.mark.parametrize("M", [60, 120, 200, 250])  # tiles of 32 and 64 rows, with 15 to 63 of an expert
@pytest.mark.parametrize("programs", [1, 2])
def test_rings_match_the_reference_on_a_gpu(M, rank, programs):
    from jaxglue.ops.moe.few_rows import RingTiles, TritonFewRowsExperts, fitting_tiles

    E, k, D, F = 16, 4, 512, 320
    (x, routing, *matrices), options = case(M, E, k, D, F, stored="mxfp4", bias=True, activation="gpt_oss")
    x, lora = x.astype(jnp.bfloat16), adapters(E, D, F, (rank, rank)) if rank else None
    with jax.default_matmul_precision("highest"):
        want = moe_mlp(x.astype(jnp.float32), routing, *matrices, **options, lora=lora, backend="reference")
    tiles = fitting_tiles("mxfp4", routing.groups.tiles.rows)
    ring = RingTiles(groups=4 - programs, stages=2 + programs, programs=programs)
    tiles = replace(tiles, ring=ring)
    with FEW_ROWS_EXPERTS.using(TritonFewRowsExperts.of((9, 0), tiles=tiles)):
        for _ in range(3):  # counts are zeros again after a launch
            got = moe_mlp(x, routing, *matrices, **options, lora=lora, inference=True)
            assert np.linalg.norm(np.asarray(got, np.float32) - want) < 0.01 * np.linalg.norm(want)


def test_training_takes_other_kernels():
    arrays, options = case(3, 4, 2, 32, 16)
    with FEW_ROWS_EXPERTS.using("not called"):
        moe_mlp(*arrays, **options)


def test_obstacles_are_named(monkeypatch):
    def reason(M, rank=4, **options):
        (x, routing, *matrices), options = case(M, 4, 2, 32, 32, **options)
        of_rows = adapters(4, 32, 32, (rank, 4)).of_rows(routing)
        call = meaning(x.astype(jnp.bfloat16), routing, matrices, options, of_rows)
        return FEW_ROWS_EXPERTS.choose((9, 0), call).reason

    assert "more than 64 rows each" in reason(129, stored="mxfp4")
    assert "more than 32 rows each" in reason(65)
    assert "rank must be at most 64, got 65" in reason(3, rank=65, stored="mxfp4")
    assert "matrices are read once" in reason(3, stored="mxfp4")
    monkeypatch.setattr(backend, "UNTRIED", {"few rows of experts, more than 32 each"})
    assert "no GPU has run" in reason(65, stored="mxfp4")
    assert "matrices are read once" in reason(64, stored="mxfp4")
    assert "another dtype" in reason(3)


@pytest.mark.parametrize(
    ("stored", "rank"),
    [
        repeat("mxfp4", 0),
        ("mxfp4", 16),
        repeat("gpt-oss", 0),
        ("gpt-oss", 16),
        ("nf4", 0),
        repeat("nf4", 64),
        repeat("fp8", 0),
        repeat("fp8", 8),
        repeat(None, 16),
        repeat("exact", 16),
    ],
)
def test_kernels_compile_for_a_gpu(stored, rank, h200, monkeypatch):
    from jaxglue.ops.launch import triton_lib  # where its compiler has been set

    compile, texts = triton_lib.compile_ttir_inplace, []
    stored, exact = (None, True) if stored == "exact" else (stored, False)
    stored, activation = ("mxfp4", "gpt_oss") if stored == "gpt-oss" else (stored, "swiglu")

    def noted(*args, **options):
        found = compile(*args, **options)
        texts.append(found.binary)
        return found

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", noted)
    half = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=h200)  # noqa: E731
    E, D, F = 8, 1024 if activation == "swiglu" else 1056, 192  # kernels of other cases are not compiled again

    def matrix(rows, columns):
        if stored != "mxfp4":
            weight = half(E, rows, columns)
            made = jax.eval_shape(partial(hold_matrices, FORMATS[stored]), weight) if stored else weight
            return jax.tree.map(lambda part: half(*part.shape, dtype=part.dtype), made)
        blocks = half(E, rows, columns // 32, 16, dtype=jnp.uint8)
        return MXFP4(blocks=blocks, scales=half(E, rows, columns // 32, dtype=jnp.uint8))

    def adapter(rows, columns):
        return ExpertAdapter(half(E, rank, columns, dtype=jnp.float32), half(E, rows, rank, dtype=jnp.float32))

    def mlp(x, logits, gate_up, down, lora):
        routing = route(logits, 2, inference=True, exact=exact)
        options = {"activation": activation, "transpose_rhs": True, "inference": True, "exact": exact}
        return moe_mlp(x, routing, gate_up, down, lora=lora, **options)

    lora = ExpertLora(gate_up=adapter(2 * F, D), down=adapter(D, F), scales=(2.0, 2.0)) if rank else None
    with tracing_for((9, 0)):
        program = jax.jit(mlp).lower(half(32, D), half(32, E), matrix(2 * F, D), matrix(D, F), lora).compile()
    # Adapters have no launches of their own but of rings, which serve gate and up of GPT-OSS, and down of any MXFP4.
    own = (1 + (activation == "gpt_oss")) * (stored == "mxfp4" and rank > 0)
    assert program.as_text().count("triton_kernel_call_ffi") == 5 - exact + own
    matmuls = [text for text in texts if "wgmma.mma_async" in text]
    assert len(matmuls) == 2 and not any(map(matmuls_left_running, matmuls))
