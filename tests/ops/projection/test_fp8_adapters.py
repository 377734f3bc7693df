"""FP8 products with adapters against float32, and the programs for GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import outputs_and_gradients

from jaxglue.engine.compiler import jit_step
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.norm_rope import rms_norm
from jaxglue.ops.projection.fp8_adapters import add_adapted_fp8, project_adapted_fp8, residual_norm_fp8
from jaxglue.ops.projection.lora import LORA
from jaxglue.ops.quant.fp8 import quantize_fp8

M, D, OUTPUTS, R = 37, 64, (72, 24, 24), 4


def random_case(M, D, outputs, R, dtype=jnp.float32):
    """Return ((x, weights, down, ups), cotangents) with weights in float32."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 3 * len(outputs)))

    def normal(*shape, dtype=jnp.float32):
        return (jax.random.normal(next(keys), shape) * shape[-1] ** -0.5).astype(dtype)

    x, down = normal(1, M, D, dtype=dtype) * D**0.5, normal(len(outputs) * R, D)
    weights, ups = [normal(N, D) for N in outputs], [normal(N, R) for N in outputs]
    return (x, weights, down, ups), [normal(1, M, N, dtype=dtype) for N in outputs]


def in_fp8(x, weights, down, ups):
    return project_adapted_fp8(x, [quantize_fp8(weight) for weight in weights], down, ups)


def by_definition(x, weights, down, ups):
    ranks = jnp.split(x @ down.T, len(ups), axis=-1)
    return [x @ W.T + low @ up.T for W, low, up in zip(weights, ranks, ups, strict=True)]


def all_results(function, arguments, cotangents):
    """Return outputs and gradients to x and the adapters."""
    x, weights, down, ups = arguments
    return outputs_and_gradients(lambda x, d, u: function(x, weights, d, u), (x, down, ups), cotangents)


def assert_same_direction(got, expected, least):
    for left, right in zip(got, expected, strict=True):
        left, right = np.ravel(left).astype(np.float64), np.ravel(right).astype(np.float64)
        assert left @ right > least * np.linalg.norm(left) * np.linalg.norm(right)
        np.testing.assert_allclose(np.linalg.norm(left), np.linalg.norm(right), rtol=0.03)


@pytest.fixture(params=["reference", "kernels"])
def backend(request):
    """Return the backend: None for the reference, or interpreted kernels with small tiles."""
    if request.param == "reference":
        return None
    from jaxglue.ops.projection.triton import GradientTiles, TritonLora

    tiles = GradientTiles(block_m=16, block_n=16, columns=32)
    interpreted = request.getfixturevalue("interpreted")(TritonLora)
    return interpreted(compute_capability=90, gradient_tiles=tiles, product_tiles=tiles)


def test_outputs_and_gradients_are_close_to_float32(backend):
    case = random_case(M, D, OUTPUTS, R)
    with LORA.using(backend):
        got = all_results(in_fp8, *case)
    assert_same_direction(got, all_results(by_definition, *case), 0.995)


def results_behind_a_norm(case, *, fp8):
    """Return a residual stream, the products of its norm, and gradients to the stream and the adapters."""
    (x, weights, down, ups), cotangents = case
    x, norm = x.at[..., 5].multiply(30), jnp.linspace(0.2, 2, x.shape[-1])

    def apply(x, down, ups):
        if not fp8:
            return x, by_definition(rms_norm(x, norm, 1e-3), weights, down, ups)
        stream, rows = residual_norm_fp8(x, norm, 1e-3)
        return stream, project_adapted_fp8(rows, [quantize_fp8(weight) for weight in weights], down, ups)

    return outputs_and_gradients(apply, (x, down, ups), (0.1 * x, cotangents))


def test_norms_are_multiplied_from_codes_and_shrunk_from_their_input(backend):
    case = random_case(M, D, OUTPUTS, R)
    with LORA.using(backend):
        got = results_behind_a_norm(case, fp8=True)
    assert_same_direction(got, results_behind_a_norm(case, fp8=False), 0.995)


def results_of_adding(function, case):
    """Return a residual stream plus a product, and gradients to both inputs and the adapter."""
    (x, (weight,), down, (up,)), cotangents = case
    inputs = cotangents[0][..., ::-1], x, down, up
    return outputs_and_gradients(lambda s, x, d, u: function(s, x, weight, d, u), inputs, cotangents[0])


def test_a_product_is_added_to_the_stream(backend):
    case = random_case(M, D, OUTPUTS[:1], R)
    with LORA.using(backend):
        got = results_of_adding(lambda s, x, w, d, u: add_adapted_fp8(s, x, quantize_fp8(w), d, u), case)
    expected = results_of_adding(lambda s, x, w, d, u: s + x @ w.T + x @ d.T @ u.T, case)
    assert_same_direction(got, expected, 0.995)


@pytest.mark.gpu
def test_bf16_is_close_to_float32_on_a_gpu():
    arguments, cotangents = random_case(1000, 512, (768, 256, 256), 16, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arguments, cotangents))
        expected = all_results(by_definition, *wide)
    assert_same_direction(all_results(in_fp8, arguments, cotangents), expected, 0.995)


def test_scales_are_applied_where_adapters_are_added(h200):
    rows, outputs = 2048, (1024, 256)

    def make():
        (x, weights, down, ups), cotangents = random_case(rows, 512, outputs, 16, jnp.bfloat16)
        return (x, [quantize_fp8(weight) for weight in weights], down, ups), cotangents

    shaped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200), jax.eval_shape(make))

    def step(arguments, cotangents):
        x, weights, down, ups = arguments
        results, pull = jax.vjp(lambda x, d, u: project_adapted_fp8(x, weights, d, u), x, down, ups)
        return results, pull(cotangents)

    with tracing_for((9, 0)):
        text = jit_step(step).lower(*shaped).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert program.count("__cublas$lt$matmul$f8") == 2 + 2
    assert not re.search(rf"(bf16|f8e4m3fn)\[(1,)?{rows},(1024|512)\]\S* (fusion|add|multiply|copy)\(", program)
