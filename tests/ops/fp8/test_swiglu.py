"""The FP8 feed-forward: reference and kernels against float32, and its programs for GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, outputs_and_gradients

from jaxglue.engine.compiler import jit_step
from jaxglue.ops import names
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.fp8 import swiglu_fp8
from jaxglue.ops.lora_swiglu import LORA_SWIGLU, lora_swiglu
from jaxglue.ops.quant.fp8 import quantize_fp8

D = 64
CASES = [(37, 96, 16), (40, 80, 4)]
"""Rows, F and rank; no tile divides the first two."""


def random_case(M, F, R, dtype=jnp.float32):
    """Return ((x, first, weights, matrices), cotangents) with weights in float32."""
    keys = iter(jax.random.split(jax.random.key(0), 10))

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

    weights = tuple(normal(*shape, dtype=jnp.float32, scale=shape[1] ** -0.5) for shape in ((F, D), (F, D), (D, F)))
    matrices = tuple(normal(*shape, dtype=jnp.float32, scale=0.1) for shape in ((F, R), (F, R), (R, F)))
    x = normal(1, M, D).at[..., 3].multiply(20)
    return (x, normal(2 * R, D, dtype=jnp.float32, scale=D**-0.5), weights, matrices), (
        normal(1, M, D),
        normal(1, M, R),
    )


def in_fp8(x, first, weights, matrices):
    return swiglu_fp8(x, tuple(map(quantize_fp8, weights)), first, matrices)


def by_definition(x, first, weights, matrices):
    gate, up, down = weights
    y, low = lora_swiglu(x @ gate.T, x @ up.T, x @ first.T, matrices, backend="reference")
    return y @ down.T, low


def all_results(function, arguments, cotangents):
    """Return outputs and gradients to x and the adapters."""
    x, first, weights, matrices = arguments
    return outputs_and_gradients(lambda x, f, m: function(x, f, weights, m), (x, first, matrices), cotangents)


@pytest.fixture(params=["reference", "kernel"])
def backend(request):
    """None for the reference, or the kernels on the CPU with small tiles."""
    if request.param == "reference":
        return None
    interpreted = request.getfixturevalue("interpreted")
    from jaxglue.ops.lora_swiglu.tiles import LoraSwigluTiles
    from jaxglue.ops.lora_swiglu.triton import TritonLoraSwiglu

    tiles = LoraSwigluTiles(block_m=16, block_n=16, length=32, num_warps=1, num_stages=1)
    return interpreted(TritonLoraSwiglu)(compute_capability=90, forward_tiles=tiles, backward_tiles=tiles)


def assert_same_direction(got, expected, least):
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        left, right = np.ravel(left).astype(np.float64), np.ravel(right).astype(np.float64)
        assert left @ right > least * np.linalg.norm(left) * np.linalg.norm(right)
        np.testing.assert_allclose(np.linalg.norm(left), np.linalg.norm(right), rtol=0.04)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_close_to_float32(backend, case):
    case = random_case(*case)
    with LORA_SWIGLU.using(backend):
        got = all_results(in_fp8, *case)
    assert_same_direction(got, all_results(by_definition, *case), 0.995)


def test_kernels_match_the_reference(interpreted):
    from jaxglue.ops.lora_swiglu.triton import TritonLoraSwiglu

    case = random_case(*CASES[0])
    with LORA_SWIGLU.using(interpreted(TritonLoraSwiglu)(compute_capability=90)):
        got = all_results(in_fp8, *case)
    assert_same_direction(got, all_results(in_fp8, *case), 0.9999)


def test_saved_products_keep_the_largest_codes():
    (x, first, weights, matrices), cotangents = random_case(*CASES[0])
    gate = weights[0].at[0].set(jnp.sign(weights[0][0]))
    x = x.at[0, 0].set(jnp.sign(gate[0]))  # their product is beyond the largest code
    case = (x, first, (gate, *weights[1:]), matrices), cotangents
    policy = jax.checkpoint_policies.save_only_these_names(names.GATE, names.UP)

    def saving(x, first, weights, matrices):
        return jax.checkpoint(lambda *inputs: in_fp8(*inputs[:2], weights, inputs[2]), policy=policy)(
            x, first, matrices
        )

    got, expected = (all_results(function, *case) for function in (saving, in_fp8))
    assert_close(got, expected, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(1000, 3072, 16), (304, 1008, 32)])
def test_bf16_is_close_to_float32_on_a_gpu(case):
    arguments, cotangents = random_case(*case, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arguments, cotangents))
        expected = all_results(by_definition, *wide)
    assert_same_direction(all_results(in_fp8, arguments, cotangents), expected, 0.995)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_wide_arrays_are_quantized_in_one_pass(gpu_target, capability):
    M, F, R = 1024, 512, 16

    def make():
        (x, first, weights, matrices), cotangents = random_case(M, F, R, jnp.bfloat16)
        return (x, first, tuple(map(quantize_fp8, weights)), matrices), cotangents

    sharding = gpu_target(capability)
    shaped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(make))

    def step(arguments, cotangents):
        x, first, weights, matrices = arguments
        outputs, pull = jax.vjp(lambda x, f, m: swiglu_fp8(x, weights, f, m), x, first, matrices)
        return outputs, pull(cotangents)

    with tracing_for(capability):
        text = jit_step(step).lower(*shaped).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert program.count("__cublas$lt$matmul$f8") == 3 + 3
    # Products go straight to kernels, and kernels make their outputs e4m3.
    assert not re.search(rf"(bf16|f8e4m3fn)\[(1,)?{M},{F}\]\S* (fusion|add|multiply|copy)\(", program)
    assert not re.search(rf"= f32\[{M}\]\S* fusion\([^)]*bf16\[{M},{F}\]", program)
