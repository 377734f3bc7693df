"""SwiGLU and GeGLU between adapters: kernels and reference against the definition."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from closeness import assert_close, outputs_and_gradients

from jaxglue.ops.backend import tracing_for
from jaxglue.ops.gated_mlp.swiglu import ACTIVATIONS, LORA_SWIGLU, lora_swiglu

# rows, columns, rank; no tile divides the first two
CASES = [(37, 72, 16), (40, 24, 4), (5, 100, 20)]


def random_case(M, F, R, dtype=jnp.float32):
    """Return (arguments, cotangents)."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

    matrices = [normal(*shape, dtype=jnp.float32, scale=R**-0.5) for shape in ((F, R), (F, R), (R, F))]
    wide = normal(1, M, F), normal(1, M, F), normal(1, M, 2 * R)
    return (*wide, tuple(matrices)), (normal(1, M, F), normal(1, M, R))


def by_definition(gate, up, hidden, matrices, activation="silu"):
    first, second = jnp.split(hidden, 2, axis=-1)
    y = ACTIVATIONS[activation](gate + first @ matrices[0].T) * (up + second @ matrices[1].T)
    return y, y @ matrices[2].T


@pytest.fixture(params=["reference", "kernel"])
def backend(request):
    """Return the backend: None for the reference, or interpreted kernels with small tiles."""
    if request.param == "reference":
        return None
    interpreted = request.getfixturevalue("interpreted")
    from jaxglue.ops.gated_mlp.triton import LoraSwigluTiles, TritonLoraSwiglu

    tiles = LoraSwigluTiles(block_m=16, block_n=16, length=32, num_warps=1, num_stages=1)
    return interpreted(TritonLoraSwiglu)(compute_capability=90, forward_tiles=tiles, backward_tiles=tiles)


@pytest.mark.parametrize(("case", "activation"), [*((case, "silu") for case in CASES), (CASES[0], "gelu_tanh")])
def test_outputs_and_gradients_match_the_definition(backend, case, activation):
    case = random_case(*case)
    with LORA_SWIGLU.using(backend):
        got = outputs_and_gradients(partial(lora_swiglu, activation=activation), *case)
    assert_close(got, outputs_and_gradients(partial(by_definition, activation=activation), *case), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", [*CASES, (1000, 3072, 16), (300, 1000, 32)])
def test_bf16_matches_float32_on_a_gpu(case, activation):
    case = random_case(*case, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        definition = partial(by_definition, activation=activation)
        expected = outputs_and_gradients(definition, *jax.tree.map(lambda x: x.astype(jnp.float32), case))
    got = outputs_and_gradients(partial(lora_swiglu, activation=activation), *case)
    assert_close(got, expected, 1e-2)


def test_only_kernels_write_wide_arrays(h200):
    M, F, R = 1024, 512, 16
    arguments, cotangents = jax.eval_shape(lambda: random_case(M, F, R, jnp.bfloat16))
    shaped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200), (arguments, cotangents))

    def step(arguments, cotangents):
        outputs, pull = jax.vjp(lora_swiglu, *arguments)
        return outputs, pull(cotangents)

    with tracing_for((9, 0)):
        text = jax.jit(step).lower(*shaped).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert (
        program.count('custom_call_target="triton_kernel_call_ffi"') == 2 + 2
    )  # and what gate's and up's adapters get
    assert not re.search(rf"bf16\[(1,)?{M},{F}\]\S* (fusion|add|multiply|copy)\(", program)


def test_ranks_that_differ_are_refused():
    (gate, up, hidden, matrices), _ = random_case(4, 8, 2)
    with pytest.raises(ValueError, match=r"one rank R, and low_rank 2R columns, got ranks 2 and 3 columns"):
        lora_swiglu(gate, up, hidden[..., :3], matrices)
