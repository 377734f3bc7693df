"""Weights served with their adapter merged: rounding, gradients straight through it, and the kernel."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.backend import HOPPER, tracing_for
from jaxglue.ops.projection import LowRankAdapter, Projection, adapted_projection
from jaxglue.ops.projection.dora import magnitude_gain, row_norms
from jaxglue.ops.projection.served import MERGE, ReferenceMerge, merge, merge_experts
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.quant.k_quants import quantize_super_blocks
from jaxglue.ops.quant.served import SERVE_AS, ServedKQuant, ServedStored, is_sensitive
from jaxglue.ops.quant.stack import Stack

OUT, IN, RANK = 96, 512, 5
STORED = ["nvfp4 stored", "nf4 stored", "mxfp4 stored"]
CASES = [("nvfp4", False), ("nf4", False), ("q4_k_m", False), ("q4_k_m", True)]
CASES += [("nvfp4 stored", False), *(repeat(kind, False) for kind in STORED[1:])]

MOVED = [("nf4", False), ("q4_k_m", True), *(repeat(kind, False) for kind in ("nvfp4", "q4_k_m", *STORED))]
"""Formats of floating-point and of whole numbers."""


class Layer:
    """Conditions of a layer that trains."""

    dropout_key, fp8 = None, False


def normal(seed, *shape, std=1.0):
    return jax.random.normal(jax.random.key(seed), shape) * std


def held(kind, sensitive=False, out=OUT, columns=IN, dtype=jnp.float32):
    """Return a matrix with a block of zeros and an outlier, on its grid."""
    matrix = normal(0, out, columns, std=0.02).at[0, :256].set(0).at[1, 3].set(0.5)
    if kind in STORED:
        return ServedStored.of(FORMATS[kind.removesuffix(" stored")].quantize(matrix.astype(dtype)))
    return SERVE_AS[kind].hold(matrix.astype(dtype), sensitive=sensitive)


def factors(out=OUT, columns=IN, rank=RANK):
    """Return matrices of an adapter whose delta is about a step."""
    return normal(1, rank, columns, std=0.05), normal(2, out, rank, std=0.05)


@pytest.mark.parametrize(("kind", "sensitive"), CASES)
def test_merges_take_the_nearest_level_and_are_stored_so(kind, sensitive):
    weight, (A, up) = held(kind, sensitive), factors()
    total = np.asarray(weight.matrix, np.float64) + np.asarray(up, np.float64) @ np.asarray(A, np.float64)
    got = np.asarray(merge(weight, A, up, jnp.float32), np.float64)
    every = np.asarray(jax.vmap(lambda code: weight.decode(jnp.full(weight.shape, code)))(jnp.arange(16)))
    if kind == "q4_k_m":
        every = np.arange(64 if sensitive else 16)[:, None, None] * np.ones((1, OUT, IN))
    step = np.repeat(weight.levels.step, weight.block, axis=1)
    low = 0 if weight.levels.low is None else np.repeat(weight.levels.low, weight.block, axis=1)
    nearest = np.abs(every * step - low - total).min(axis=0)
    np.testing.assert_allclose(np.abs(got - total), nearest, atol=1e-7)
    assert (got != np.asarray(weight.dequantize(jnp.float32))).mean() > 0.1
    codes = weight.codes(jnp.matmul(up, A, precision="highest"))
    packed = weight.pack(codes)
    if kind != "q4_k_m":
        np.testing.assert_array_equal(packed.dequantize(jnp.float32), got.astype(np.float32))
    else:
        assert packed.shape == (OUT, IN // 256 * (210 if sensitive else 144))


@pytest.mark.parametrize(("kind", "sensitive"), MOVED)
def test_merges_move_on_average_by_a_delta_of_a_part_of_a_step(kind, sensitive):
    weight = held(kind, sensitive, out=256)
    step = np.abs(np.repeat(weight.levels.step, weight.block, axis=1))
    part = 0.015 if "nf4" in kind else 0.1  # whose values are in −1 … 1
    delta = part * np.median(step[step > 0]) * np.random.default_rng(0).choice([-1, 1], weight.shape)
    moved = np.asarray(weight.merged(jnp.asarray(delta, jnp.float32), jnp.float32) - weight.dequantize(jnp.float32))
    moved, delta = moved[2:], delta[2:]
    assert 0.02 < (moved != 0).mean() < 0.3
    assert (moved * delta).sum() == pytest.approx((delta**2).sum(), rel=0.06)


@pytest.mark.parametrize("kind", STORED)
def test_a_stored_matrix_stays_what_it_is_without_a_delta(kind):
    weight = held(kind)
    assert not np.isin(weight.units(weight.matrix)[2:], weight.coding.values).any(), "all have places in their cells"
    np.testing.assert_array_equal(weight.merged(None, jnp.float32), weight.stored.dequantize(jnp.float32))


def test_a_gain_scales_rows_before_they_are_rounded():
    weight, (A, up), gain = held("nf4"), factors(), normal(3, OUT, std=0.1) + 1
    got = merge(weight, A, up, jnp.float32, gain)
    total = gain[:, None] * (weight.matrix + jnp.matmul(up, A, precision="highest"))
    np.testing.assert_array_equal(got, replace(weight, matrix=total).merged(None, jnp.float32))


@pytest.mark.parametrize("sensitive", [False, True])
def test_grids_of_k_quants_are_those_of_a_matrix_without_adapter(sensitive):
    matrix, kind = normal(0, OUT, IN, std=0.02), "q6_k" if sensitive else "q4_k"
    expected = np.asarray(quantize_super_blocks(matrix.reshape(-1, 256), kind)).reshape(OUT, -1)
    fitted = ServedKQuant.of(matrix, kind)
    np.testing.assert_array_equal(fitted.pack(fitted.codes(None)), expected)
    spread = SERVE_AS["q4_k_m"].hold(matrix, sensitive=sensitive)
    # In bfloat16's precision a few values pass to the next cell, at whose end they are.
    assert (spread.codes(None) != fitted.codes(None)).mean() < (0.1 if sensitive else 0.03)
    for before, after in zip(fitted.levels, spread.levels, strict=True):
        np.testing.assert_array_equal(before, after)


def test_matrices_that_get_more_bits_are_those_of_llama_cpp():
    names = [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(16)]
    assert [layer for layer, name in enumerate(names) if is_sensitive(name, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert not is_sensitive("model.layers.0.self_attn.q_proj.weight", 16)


@pytest.mark.parametrize(
    ("kind", "onto_stream"), [("nvfp4", True), ("q4_k_m", False), repeat("nvfp4", False), repeat("q4_k_m", True)]
)
def test_gradients_pass_the_rounding(kind, onto_stream):
    x, stream, dy = normal(3, 2, 7, IN), normal(4, 2, 7, OUT), normal(5, 2, 7, OUT)
    count, bias = 1 if onto_stream else 2, normal(6, OUT)
    weights = [held(kind), held(kind, sensitive=True)][:count]

    def apply(x, adapters):
        parts = [Projection(weight=w, bias=bias, adapter=a) for w, a in zip(weights, adapters, strict=True)]
        outputs = adapted_projection(x, parts, Layer(), stream=stream if onto_stream else None)
        return sum((y * dy * (index + 1)).sum() for index, y in enumerate(outputs))

    def plain(x, adapters):
        total = 0.0
        for index, (weight, adapter) in enumerate(zip(weights, adapters, strict=True)):
            merged = weight.merged(adapter.up @ adapter.A, jnp.float32)
            beside = jax.lax.stop_gradient(x) @ adapter.A.T @ adapter.up.T
            y = x @ jax.lax.stop_gradient(merged).T + beside - jax.lax.stop_gradient(beside) + bias
            total += ((y + stream if onto_stream else y) * dy * (index + 1)).sum()
        return total

    A, up = factors()
    pairs = [(A, up), (A[:3], 2 * up[:, :3])][:count]

    def value_and_gradients(function):
        def of_pairs(x, pairs):
            return function(x, [LowRankAdapter(A=A, B=B, scale=0.5) for A, B in pairs])

        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.value_and_grad(of_pairs, argnums=(0, 1)))(x, pairs)

    for got, expected in zip(*map(jax.tree.leaves, map(value_and_gradients, (apply, plain))), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5 * float(jnp.abs(expected).max()))


def test_a_weight_without_adapter_is_rounded_alone():
    weight, x = held("nf4"), normal(3, 4, IN)
    (got,) = adapted_projection(x, [Projection(weight=weight)], Layer())
    np.testing.assert_allclose(got, x @ weight.dequantize(jnp.float32).T, rtol=1e-5, atol=1e-5)


def assert_alike(got, expected, weight, flips):
    """Compare merges; a share of values may be one level off, where a sum is near the middle of two."""
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    differ = np.abs(got - expected) > 1e-2 * np.abs(expected) + 1e-6
    assert differ.mean() <= flips, differ.mean()
    step = np.repeat(weight.levels.step, weight.block, axis=1)
    assert (np.abs(got - expected) <= 2.01 * np.abs(step) + 1e-6).all()


@pytest.mark.parametrize(("kind", "sensitive"), CASES)
def test_interpreted_kernel_matches_the_reference(kind, sensitive, interpreted):
    from jaxglue.ops.projection.served_triton import TritonMerge

    weight, (A, up) = held(kind, sensitive, out=70, columns=768), factors(70, 768)
    expected = merge(weight, A, up, jnp.float32, backend="reference")
    with MERGE.using(interpreted(TritonMerge)(compute_capability=90, precision="ieee")):
        assert_alike(merge(weight, A, up, jnp.float32), expected, weight, 1e-4)


@pytest.mark.parametrize("kind", ["nvfp4", repeat("mxfp4 stored")])
def test_interpreted_kernel_merges_each_experts_adapter_and_gains(kind, interpreted):
    from jaxglue.ops.projection.served_triton import TritonMerge

    E, out, columns = 3, 40, 256
    rows = held(kind, out=E * out, columns=columns)
    weight = Stack(rows=rows, out=out)
    A, up = normal(1, E, RANK, columns, std=0.05), normal(2, E, out, RANK, std=0.05)
    expected = merge_experts(weight, A, up, jnp.float32, backend="reference")
    for expert in range(E):
        own = rows.part(slice(expert * out, (expert + 1) * out))
        np.testing.assert_array_equal(expected[expert], merge(own, A[expert], up[expert], jnp.float32))
    gain = normal(3, E * out, std=0.1) + 1
    kernels = interpreted(TritonMerge)(compute_capability=90, precision="ieee")
    scaled = ReferenceMerge().merge(rows, A, up, jnp.float32, gain)
    with MERGE.using(kernels):
        assert_alike(
            merge_experts(weight, A, up, jnp.float32).reshape(E * out, columns),
            expected.reshape(E * out, columns),
            rows,
            1e-4,
        )
        assert_alike(kernels.merge(rows, A, up, jnp.float32, gain), scaled, rows, 1e-4)


@pytest.mark.parametrize("dora", [repeat(False), True])
def test_the_magnitudes_of_served_weights_train(dora):
    weight, x, dy, (A, B) = held("nvfp4"), normal(3, 6, IN), normal(5, 6, OUT), factors()
    magnitude = row_norms(weight) * 1.1

    def loss(x, A, B, magnitude):
        adapter = LowRankAdapter(A=A, B=B, magnitude=magnitude if dora else None)
        return (adapted_projection(x, [Projection(weight=weight, adapter=adapter)], Layer())[0] * dy).sum()

    def plain(x, A, B, magnitude):
        fixed = jax.lax.stop_gradient
        gain = magnitude_gain(weight, A, B, magnitude, dtype=jnp.float32) if dora else jnp.ones(OUT)
        merged = fixed(weight.merged(jnp.matmul(B, A, precision="highest"), jnp.float32, gain))
        beside = (fixed(x) @ A.T @ B.T) * fixed(gain)
        return ((x @ merged.T) * (gain / fixed(gain)) * dy + (beside - fixed(beside)) * dy).sum()

    with jax.default_matmul_precision("highest"):
        pairs = zip(*(jax.grad(f, argnums=(0, 1, 2, 3))(x, A, B, magnitude) for f in (loss, plain)), strict=True)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()) + 1e-7)


@pytest.mark.parametrize("storage", ["served_nvfp4", repeat("served_nf4_stored")])
def test_the_kernel_compiles_for_a_gpu_and_leaves_one_temporary(storage, h200):
    out, columns, tokens = 3072, 1024, 2048

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200)

    weight = jax.eval_shape(FORMATS[storage].quantize, shaped(out, columns))
    weight = jax.tree.map(lambda part: shaped(*part.shape, dtype=part.dtype), weight)
    pair = shaped(16, columns, dtype=jnp.float32), shaped(out, 16, dtype=jnp.float32)

    def forward(x, weight, A, B):
        return adapted_projection(x, [Projection(weight=weight, adapter=LowRankAdapter(A=A, B=B))], Layer())[0]

    with tracing_for(HOPPER):
        compiled = jax.jit(forward).lower(shaped(tokens, columns), weight, *pair).compile()
    assert "triton_kernel_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.3 * 2 * out * columns


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "sensitive"), CASES)
@pytest.mark.parametrize("rank", [8, 64])
def test_kernel_on_a_gpu_matches_the_reference(kind, sensitive, rank):
    weight = held(kind, sensitive, out=1000, columns=4096, dtype=jnp.bfloat16)
    A, up = factors(1000, 4096, rank)
    got, expected = (merge(weight, A, up, jnp.bfloat16, backend=backend) for backend in ("triton", "reference"))
    # TF32 moves sums across the middle of levels, of which q6_k has most: the deltas here are as large as the weights.
    assert_alike(got, expected, weight, 1.5e-2 if sensitive else 2e-3)
