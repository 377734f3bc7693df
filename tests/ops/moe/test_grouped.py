"""Grouped matmul: output and gradients of every backend against NumPy, on uneven groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.moe import GROUPED_MATMUL, GroupedCall, GroupMetadata, grouped_matmul
from jaxglue.ops.moe.tiles import GroupedTiles, MatmulTiles, grouped_tiles
from jaxglue.ops.moe.vjp import ExpertLowRank, ExpertRows, ExpertScales
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.mxfp4 import MXFP4

# name: (group sizes, K, N, transposed, bias)
CASES = {
    "uneven, with empty groups": ([0, 5, 33, 0, 17, 1, 0], 40, 24, False, True),
    "transposed": ([7, 40, 2], 24, 40, True, False),
    "all rows in one group": ([0, 0, 50, 0], 16, 32, True, True),
    "ends on tile boundaries": ([16, 32, 16], 32, 16, False, False),
    "one row": ([0, 1], 16, 16, False, True),
    "more groups than rows": ([1, 0] * 6 + [1], 20, 20, True, True),
    "narrow, as an adapter": ([20, 30], 48, 4, True, False),
}


def random_case(name, dtype=jnp.float32):
    """Return (lhs, rhs, bias, dout, sizes, transposed) of a case."""
    sizes, K, N, transposed, with_bias = CASES[name]
    rng, S, E = np.random.default_rng(0), sum(sizes), len(sizes)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    rhs = normal(E, N, K) if transposed else normal(E, K, N)
    return normal(S, K), rhs, normal(E, N) if with_bias else None, normal(S, N), np.array(sizes), transposed


def group_by_group(lhs, rhs, bias, dout, sizes, transposed):
    """Compute the definition in NumPy: (out, (dlhs, drhs, dbias))."""
    lhs, rhs, bias, dout = (None if x is None else np.asarray(x, np.float64) for x in (lhs, rhs, bias, dout))
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    matrices = rhs.swapaxes(1, 2) if transposed else rhs
    out, dlhs = np.zeros(dout.shape), np.zeros(lhs.shape)
    for group, matrix in zip(groups, matrices, strict=True):
        out[group], dlhs[group] = lhs[group] @ matrix, dout[group] @ matrix.T
    dmatrices = np.stack([lhs[group].T @ dout[group] for group in groups])
    drhs = dmatrices.swapaxes(1, 2) if transposed else dmatrices
    if bias is None:
        return out, (dlhs, drhs, None)
    return out + np.repeat(bias, sizes, axis=0), (dlhs, drhs, np.stack([dout[group].sum(0) for group in groups]))


@pytest.mark.parametrize("row_tile", [None, 192])
def test_interpreted_kernel_applies_scales(interpreted_kernels, row_tile):
    rng, sizes = np.random.default_rng(0), np.array([0, 5, 33, 0, 170])
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    x, rhs, bias, B = normal(70, 40), normal(5, 24, 40), normal(5, 24), normal(5, 24, 4)
    rows, factors = jnp.abs(normal(70, 1)), jnp.abs(normal(5))
    tokens, group = jnp.asarray(rng.integers(0, 70, 208)), np.repeat(np.arange(5), sizes)
    hidden, groups = normal(208, 4), GroupMetadata.of(sizes, 208, row_tile=row_tile)
    kernels = interpreted_kernels(tiles=grouped_tiles((8, 9)), compute_capability=80)
    options = {"low_rank": ExpertLowRank(hidden, B, True), "scales": ExpertScales(rows, factors, jnp.float32)}
    got = kernels.matmul(ExpertRows(x, tokens), rhs, bias, groups, transpose_rhs=True, **options)
    scaled, matrices = (x * rows)[tokens], (rhs * factors[:, None, None])[group]
    expected = jnp.einsum("sk,snk->sn", scaled, matrices) + bias[group] + jnp.einsum("sr,snr->sn", hidden, B[group])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@partial(jax.jit, static_argnums=0)
def output_and_gradients(function, lhs, rhs, bias, dout):
    """Return (out, (dlhs, drhs, dbias)) in float32."""
    out, pull = jax.vjp(function, lhs, rhs, bias)
    return jax.tree.map(lambda x: x.astype(jnp.float32), (out, pull(dout.astype(out.dtype))))


def assert_close(got, expected, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("name", CASES)
def test_reference_matches_numpy(name):
    lhs, rhs, bias, dout, sizes, transposed = random_case(name)
    options = {"group_sizes": sizes, "transpose_rhs": transposed, "backend": "reference"}
    ours = lambda lhs, rhs, bias: grouped_matmul(lhs, rhs, bias=bias, **options)  # noqa: E731
    expected = group_by_group(lhs, rhs, bias, dout, sizes, transposed)
    assert_close(output_and_gradients(ours, lhs, rhs, bias, dout), expected, 1e-6)


@pytest.fixture
def kernel_matmul(interpreted_kernels):
    """kernel_matmul(sizes, transposed): the grouped matmul in the interpreter, with small tiles."""
    tiles = MatmulTiles(block_m=16, block_n=32, block_k=16, num_warps=4, num_stages=1, group_m=2)
    kernels = interpreted_kernels(tiles=GroupedTiles(matmul=tiles, outer=tiles), compute_capability=80)

    def make(sizes, transposed):
        groups = GroupMetadata.of(sizes, int(sizes.sum()), row_tile=16)
        return lambda lhs, rhs, bias: grouped_matmul(lhs, rhs, groups, bias=bias, transpose_rhs=transposed)

    with GROUPED_MATMUL.using(kernels):
        yield make


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_match_numpy(name, kernel_matmul):
    lhs, rhs, bias, dout, sizes, transposed = random_case(name)
    expected = group_by_group(lhs, rhs, bias, dout, sizes, transposed)
    assert_close(output_and_gradients(kernel_matmul(sizes, transposed), lhs, rhs, bias, dout), expected, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu_match_numpy(name, dtype):
    lhs, rhs, bias, dout, sizes, transposed = random_case(name, dtype)
    ours = jax.jit(partial(grouped_matmul, group_sizes=sizes, transpose_rhs=transposed, backend="triton"))
    got = output_and_gradients(lambda lhs, rhs, bias: ours(lhs, rhs, bias=bias), lhs, rhs, bias, dout)
    assert_close(got, group_by_group(lhs, rhs, bias, dout, sizes, transposed), 1e-2)


@pytest.mark.parametrize("row_tile", [128, 192])
def test_few_last_rows_of_a_group_take_part_of_a_tile(row_tile, interpreted_kernels):
    kernels = interpreted_kernels(tiles=grouped_tiles((9, 0)), compute_capability=80)
    rng, sizes = np.random.default_rng(0), np.array([140, 64, 0, 200, 300])
    groups = GroupMetadata.of(sizes, 704, row_tile=row_tile)
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((704, 20), (5, 20, 40)))
    with GROUPED_MATMUL.using(kernels):
        out, pull = jax.vjp(lambda lhs: grouped_matmul(lhs, rhs, groups), lhs)
    expected = group_by_group(lhs, rhs, None, out, sizes, False)
    assert_close((out, pull(out)[0]), (expected[0], expected[1][0]), 1e-6)


def test_frozen_matrices_save_no_rows(kernel_matmul):
    lhs, rhs, bias, _, sizes, transposed = random_case("uneven, with empty groups")
    _, pull = jax.vjp(lambda lhs: kernel_matmul(sizes, transposed)(lhs, rhs, bias), lhs)
    assert all(x.shape != lhs.shape for x in jax.tree.leaves(pull))


def test_mxfp4_matrices_match_numpy(kernel_matmul):
    rng, sizes = np.random.default_rng(0), np.array([3, 0, 6])
    packed = MXFP4(
        blocks=jnp.asarray(rng.integers(0, 256, (3, 20, 1, 16), dtype=np.uint8)),
        scales=jnp.asarray(rng.integers(124, 130, (3, 20, 1), dtype=np.uint8)),
    )
    lhs = jnp.asarray(rng.standard_normal((9, 32)), jnp.float32)
    out, pull = jax.vjp(lambda lhs: kernel_matmul(sizes, True)(lhs, packed, None), lhs)
    plain = dequantize(packed, jnp.float32)
    expected = group_by_group(lhs, plain, None, out, sizes, True)
    assert_close((out, pull(out)[0]), (expected[0], expected[1][0]), 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_sizes": np.array([3, 4])}, "must sum to the 8 rows of lhs, got a sum of 7"),
        ({"group_sizes": np.array([9, -1])}, "at least 0"),
        ({"rhs": jnp.zeros((2, 5, 3))}, r"rhs must be \[E, K, N\] with E=2 groups and K=4, got \(2, 5, 3\)"),
        ({"rhs": jnp.zeros((3, 4, 3))}, "E=2 groups"),
        ({"bias": jnp.zeros((2, 4))}, r"bias of rhs must be \[E, N\] = \[2, 3\]"),
        ({"lhs": jnp.zeros((8, 1, 4))}, r"lhs must be \[S, K\]"),
        ({"backend": "cublas"}, "backend must be one of"),
        ({"backend": "triton"}, "cannot serve this grouped matmul"),
    ],
)
def test_mismatched_arguments_are_refused(changes, message):
    arguments = {"lhs": jnp.zeros((8, 4)), "rhs": jnp.zeros((2, 4, 3)), "group_sizes": np.array([5, 3])} | changes
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**arguments)


def test_choice_of_backend_names_its_reason():
    assert GROUPED_MATMUL.choose((9, 0), GroupedCall(dtype=jnp.bfloat16)).name == "triton"
    assert "no NVIDIA GPU" in GROUPED_MATMUL.choose(None, GroupedCall(dtype=jnp.bfloat16)).reason
    assert "float32" in GROUPED_MATMUL.choose((9, 0), GroupedCall(dtype=jnp.float32)).reason
    with pytest.raises(ValueError, match=r"8\.0 or newer, got 7\.5"):
        GROUPED_MATMUL.choose((7, 5), GroupedCall(dtype=jnp.bfloat16), backend="triton")
