"""The grouped matmul: every backend against plain matmuls over each group, output and gradients, on uneven groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.moe import Groups, choose_backend, grouped_matmul
from jaxglue.moe.grouped import GroupedSpec, fused_grouped_matmul
from jaxglue.moe.tiles import KernelTiles, Tiles

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
    """(lhs, rhs, bias, dout, sizes, transposed) of a case."""
    sizes, K, N, transposed, with_bias = CASES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    S, E = sum(sizes), len(sizes)
    lhs = jax.random.normal(keys[0], (S, K), dtype)
    rhs = jax.random.normal(keys[1], (E, N, K) if transposed else (E, K, N), dtype)
    bias = jax.random.normal(keys[2], (E, N), dtype) if with_bias else None
    return lhs, rhs, bias, jax.random.normal(keys[3], (S, N), dtype), np.array(sizes), transposed


def group_by_group(sizes, transposed, lhs, rhs, bias):
    """The definition, with a loop that a program on the device could not have."""
    parts, first = [], 0
    for group, size in enumerate(sizes):
        matrix = rhs[group].T if transposed else rhs[group]
        shift = 0.0 if bias is None else bias[group]
        parts.append(lhs[first : first + size] @ matrix + shift)
        first += size
    return jnp.concatenate(parts)


def output_and_gradients(function, lhs, rhs, bias, dout):
    """(out, (dlhs, drhs, dbias)) in float32."""
    out, pull = jax.vjp(function, lhs, rhs, bias)
    return jax.tree.map(lambda x: x.astype(jnp.float32), (out, pull(dout.astype(out.dtype))))


def assert_close(got, expected, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_matches_a_loop_over_the_groups(name):
    lhs, rhs, bias, dout, sizes, transposed = random_case(name)
    ours = lambda lhs, rhs, bias: grouped_matmul(  # noqa: E731
        lhs, rhs, sizes, bias=bias, transpose_rhs=transposed, backend="reference"
    )
    expected = output_and_gradients(partial(group_by_group, sizes, transposed), lhs, rhs, bias, dout)
    assert_close(output_and_gradients(ours, lhs, rhs, bias, dout), expected, 1e-6)


@pytest.fixture
def fused(interpreted_backend):
    """fused(sizes, transposed): the kernels in the interpreter, with tiles of 16."""
    tiles = Tiles(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=1, band=2)
    backend = interpreted_backend(tiles=KernelTiles(matmul=tiles, outer=tiles), compute_capability=80)

    def make(sizes, transposed):
        groups = Groups.of(sizes, int(sizes.sum()), row_tile=16)
        spec = GroupedSpec(backend=backend, transpose_rhs=transposed)
        return lambda lhs, rhs, bias: fused_grouped_matmul(spec, lhs, rhs, bias, groups)

    return make


@pytest.mark.parametrize("name", CASES)
def test_kernels_in_the_interpreter_match_a_loop_over_the_groups(name, fused):
    lhs, rhs, bias, dout, sizes, transposed = random_case(name)
    expected = output_and_gradients(partial(group_by_group, sizes, transposed), lhs, rhs, bias, dout)
    assert_close(output_and_gradients(fused(sizes, transposed), lhs, rhs, bias, dout), expected, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu_match_a_loop_over_the_groups(name, dtype):
    lhs, rhs, bias, dout, sizes, transposed = random_case(name, dtype)
    ours = jax.jit(partial(grouped_matmul, group_sizes=sizes, transpose_rhs=transposed, backend="triton"))
    got = output_and_gradients(lambda lhs, rhs, bias: ours(lhs, rhs, bias=bias), lhs, rhs, bias, dout)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (lhs, rhs, bias, dout))
    with jax.default_matmul_precision("highest"):
        expected = output_and_gradients(partial(group_by_group, sizes, transposed), *exact)
    assert_close(got, expected, 1e-2)


def test_frozen_matrices_keep_no_rows_for_their_gradient(fused):
    lhs, rhs, bias, _, sizes, transposed = random_case("uneven, with empty groups")
    _, pull = jax.vjp(lambda lhs: fused(sizes, transposed)(lhs, rhs, bias), lhs)
    assert all(x.shape != lhs.shape for x in jax.tree.leaves(pull))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_sizes": np.array([3, 4])}, "must sum to the 8 rows of lhs, got a sum of 7"),
        ({"group_sizes": np.array([9, -1])}, "at least 0"),
        ({"rhs": jnp.zeros((2, 5, 3))}, r"E=2 groups and K=4 to fit lhs, got \(2, 5, 3\)"),
        ({"rhs": jnp.zeros((3, 4, 3))}, "E=2 groups"),
        ({"bias": jnp.zeros((2, 4))}, r"bias must be \[E, N\] = \[2, 3\]"),
        ({"lhs": jnp.zeros((8, 1, 4))}, r"lhs must be \[S, K\]"),
        ({"backend": "cublas"}, "backend must be one of"),
        ({"backend": "triton"}, "cannot serve this grouped matmul"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    arguments = {"lhs": jnp.zeros((8, 4)), "rhs": jnp.zeros((2, 4, 3)), "group_sizes": np.array([5, 3])} | changes
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**arguments)


def test_the_choice_of_a_backend_names_its_reason():
    assert choose_backend(jnp.bfloat16, capability=(9, 0)).name == "triton"
    assert "no NVIDIA GPU" in choose_backend(jnp.bfloat16).reason
    assert "float32" in choose_backend(jnp.float32, capability=(9, 0)).reason
    with pytest.raises(ValueError, match=r"8\.0 \(Ampere\) or newer, got 7\.5"):
        choose_backend(jnp.bfloat16, backend="triton", capability=(7, 5))
