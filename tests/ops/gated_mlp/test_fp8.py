"""The FP8 feed-forward: reference and kernels against float32, and its programs for GPUs."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, outputs_and_gradients
from selection import repeat, repeats_parts_of

from jaxglue.engine.compiler import jit_step
from jaxglue.ops import names
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.gated_mlp import GatedParts, gated_mlp, gated_mlp_reads_fp8
from jaxglue.ops.gated_mlp.fp8 import GATE_FP8, GateCall, swiglu_fp8
from jaxglue.ops.gated_mlp.swiglu import LORA_SWIGLU, lora_swiglu
from jaxglue.ops.projection import Projection
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.quant.fp8 import quantize_fp8

D = 64
CASES = [(37, 96, 16), (40, 80, 4)]
"""Rows, F and rank; no tile divides the first two."""


def random_case(M, F, R, dtype=jnp.float32):
    """Return ((stream, x, first, weights, matrices, last), cotangents) with weights in float32."""
    keys = iter(jax.random.split(jax.random.key(0), 12))

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

    weights = tuple(normal(*shape, dtype=jnp.float32, scale=shape[1] ** -0.5) for shape in ((F, D), (F, D), (D, F)))
    matrices = tuple(normal(*shape, dtype=jnp.float32, scale=0.1) for shape in ((F, R), (F, R), (R, F)))
    x = normal(1, M, D).at[..., 3].multiply(20)
    first, last = normal(2 * R, D, dtype=jnp.float32, scale=D**-0.5), normal(D, R, dtype=jnp.float32, scale=0.1)
    return (normal(1, M, D, scale=0.1), x, first, weights, matrices, last), normal(1, M, D)


def in_fp8(stream, x, first, weights, matrices, last, activation="silu"):
    return swiglu_fp8(stream, x, tuple(map(quantize_fp8, weights)), first, matrices, last, activation)


def by_definition(stream, x, first, weights, matrices, last, activation="silu"):
    gate, up, down = weights
    products = x @ gate.T, x @ up.T, x @ first.T
    y, low = lora_swiglu(*products, matrices, activation=activation, backend="reference")
    return stream + y @ down.T + low @ last.T


def all_results(function, arguments, cotangents):
    """Return the output and gradients to the inputs and the adapters."""
    stream, x, first, weights, matrices, last = arguments
    trained = stream, x, first, matrices, last
    return outputs_and_gradients(lambda s, x, f, m, t: function(s, x, f, weights, m, t), trained, cotangents)


@pytest.fixture(params=["reference", "kernel"])
def backend(request):
    """Return the backend: None for the reference, or interpreted kernels with small tiles."""
    if request.param == "reference":
        return None
    interpreted = request.getfixturevalue("interpreted")
    from jaxglue.ops.gated_mlp.triton import LoraSwigluTiles, TritonLoraSwiglu

    tiles = LoraSwigluTiles(block_m=16, block_n=16, length=32, num_warps=1, num_stages=1)
    backend = interpreted(TritonLoraSwiglu)
    return backend(compute_capability=90, forward_tiles=tiles, backward_tiles=tiles)


def assert_same_direction(got, expected, least):
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        left, right = np.ravel(left).astype(np.float64), np.ravel(right).astype(np.float64)
        assert left @ right > least * np.linalg.norm(left) * np.linalg.norm(right)
        np.testing.assert_allclose(np.linalg.norm(left), np.linalg.norm(right), rtol=0.04)


@pytest.mark.parametrize(
    ("case", "activation"), [(CASES[0], "silu"), repeat(CASES[1], "silu"), (CASES[0], "gelu_tanh")]
)
def test_outputs_and_gradients_are_close_to_float32(backend, case, activation):
    case = random_case(*case)
    with LORA_SWIGLU.using(backend):
        got = all_results(partial(in_fp8, activation=activation), *case)
    assert_same_direction(got, all_results(partial(by_definition, activation=activation), *case), 0.995)


def test_kernels_match_the_reference(interpreted):
    from jaxglue.ops.gated_mlp.triton import TritonLoraSwiglu

    case = random_case(*CASES[0])
    with LORA_SWIGLU.using(interpreted(TritonLoraSwiglu)(compute_capability=90)):
        got = all_results(in_fp8, *case)
    assert_same_direction(got, all_results(in_fp8, *case), 0.9999)


def test_saved_products_keep_the_largest_codes():
    (stream, x, first, weights, *others), cotangents = random_case(*CASES[0])
    gate = weights[0].at[0].set(jnp.sign(weights[0][0]))
    x = x.at[0, 0].set(jnp.sign(gate[0]))  # their product is beyond the largest code
    case = (stream, x, first, (gate, *weights[1:]), *others), cotangents
    policy = jax.checkpoint_policies.save_only_these_names(names.GATE, names.UP)

    def saving(stream, x, first, weights, matrices, last):
        layer = jax.checkpoint(lambda s, x, f, m, t: in_fp8(s, x, f, weights, m, t), policy=policy)
        return layer(stream, x, first, matrices, last)

    got, expected = (all_results(function, *case) for function in (saving, in_fp8))
    assert_close(got, expected, 1e-6)


class Inference(NamedTuple):
    """Conditions of generation."""

    dropout_key: None = None
    fp8: bool = True
    inference: bool = True


@pytest.mark.parametrize("activation", ["silu", repeat("gelu_tanh")])
@pytest.mark.parametrize("kernel", [False, True])
def test_without_gradients_equals_separate_products(kernel, activation, request):
    (stream, x, _, weights, *_), _ = random_case(*CASES[0])
    parts = GatedParts(*(Projection(weight=FORMATS["fp8"].hold(quantize_fp8(weight))) for weight in weights))
    call = partial(gated_mlp, x, parts, stream=stream, activation=activation)
    assert gated_mlp_reads_fp8(parts, Inference(), activation)
    assert not gated_mlp_reads_fp8(parts, Inference(inference=False), activation)
    own = None
    if kernel:
        from jaxglue.ops.gated_mlp.triton import TritonGate

        own = request.getfixturevalue("interpreted")(TritonGate)(compute_capability=90)
    with GATE_FP8.using(own):
        got = call(Inference())
    want, tolerance = call(Inference(inference=False)), 3e-2 if kernel else 1e-6  # the interpreter rounds e4m3 wrongly
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want - stream)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_without_gradients_equals_separate_products_on_a_gpu(activation):
    (stream, x, _, weights, *_), _ = random_case(304, 1008, 16, jnp.bfloat16)
    weights = [FORMATS["fp8"].hold(quantize_fp8(weight.astype(jnp.bfloat16))) for weight in weights]
    parts = GatedParts(*(Projection(weight=weight) for weight in weights))
    call = partial(gated_mlp, x, parts, stream=stream, activation=activation)
    assert GATE_FP8.load(GateCall(dtype=stream.dtype, activation=activation)) is not None
    got, want = (np.asarray(call(Inference(inference=each)), np.float32) for each in (True, False))
    # Other roundings before it choose another e4m3 value here and there.
    assert np.linalg.norm(got - want) <= 3e-2 * np.linalg.norm(want - np.asarray(stream, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(1000, 3072, 16), (304, 1008, 32)])
def test_bf16_is_close_to_float32_on_a_gpu(case):
    arguments, cotangents = random_case(*case, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arguments, cotangents))
        expected = all_results(by_definition, *wide)
    assert_same_direction(all_results(in_fp8, arguments, cotangents), expected, 0.995)


@repeats_parts_of("test_only_kernels_write_wide_arrays")
@pytest.mark.parametrize("capability", [repeat((8, 9)), (9, 0)])
def test_wide_arrays_are_quantized_in_one_pass(gpu_target, capability):
    M, F, R = 1024, 512, 16

    def make():
        (*inputs, weights, matrices, last), cotangents = random_case(M, F, R, jnp.bfloat16)
        return (*inputs, tuple(map(quantize_fp8, weights)), matrices, last), cotangents

    sharding = gpu_target(capability)
    shaped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(make))

    def step(arguments, cotangents):
        stream, x, first, weights, matrices, last = arguments
        trained = stream, x, first, matrices, last
        outputs, pull = jax.vjp(lambda s, x, f, m, t: swiglu_fp8(s, x, weights, f, m, t), *trained)
        return outputs, pull(cotangents)

    with tracing_for(capability):
        text = jit_step(step).lower(*shaped).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert program.count("__cublas$lt$matmul$f8") == 3 + 3
    # Products go straight to kernels, and kernels make their outputs e4m3.
    assert not re.search(rf"(bf16|f8e4m3fn)\[(1,)?{M},{F}\]\S* (fusion|add|multiply|copy)\(", program)
    assert not re.search(rf"bf16\[(1,)?{M},{D}\]\S* (fusion|add|multiply)\(", program)
    assert not re.search(rf"= f32\[{M}\]\S* fusion\([^)]*bf16\[{M},{F}\]", program)
