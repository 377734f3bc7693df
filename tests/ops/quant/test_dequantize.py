"""Dequantization kernels against XLA, bit for bit: in Triton's interpreter, compiled for an H200, and on a GPU."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxglue.ops.backend import HOPPER, tracing_for
from jaxglue.ops.quant import DEQUANTIZE, DequantizeCall, dequantize, project_quantized
from jaxglue.ops.quant.fp8 import quantize_fp8
from jaxglue.ops.quant.int8 import quantize_int8
from jaxglue.ops.quant.mxfp4 import MXFP4
from jaxglue.ops.quant.nf4 import quantize_nf4


@pytest.fixture(scope="module")
def nf4():
    """The golden matrix of bitsandbytes: blocks of zeros, outliers, a last group of scales that is not full."""
    return quantize_nf4(jnp.asarray(load_file(Path(__file__).parents[2] / "goldens/nf4.safetensors")["weight"]))


@pytest.fixture(scope="module")
def mxfp4():
    """Random blocks with scales from 2^-125 to 2^125, and one that is NaN."""
    rng = np.random.default_rng(0)
    blocks = jnp.asarray(rng.integers(0, 256, (3, 50, 2, 16), dtype=np.uint8))
    scales = jnp.asarray(rng.integers(2, 253, (3, 50, 2), dtype=np.uint8)).at[1, 2].set(255)
    return MXFP4(blocks=blocks, scales=scales)


@pytest.fixture
def interpreted_kernels(interpreted):
    """Let `auto` run the kernels on the CPU."""
    from jaxglue.ops.quant.triton import TritonDequantize

    with DEQUANTIZE.using(interpreted(TritonDequantize)(compute_capability=90)):
        yield


def assert_same_bits(got, expected):
    """Compare values, signs of zeros, and NaNs."""
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_interpreted_nf4_kernel_matches_the_reference(interpreted_kernels, nf4, dtype):
    assert_same_bits(dequantize(nf4, dtype), dequantize(nf4, dtype, backend="reference"))


def test_interpreted_mxfp4_kernel_matches_the_reference(interpreted_kernels, mxfp4):
    expected = dequantize(mxfp4, jnp.float32, backend="reference")
    assert np.isnan(expected).any()
    assert_same_bits(dequantize(mxfp4, jnp.float32), expected)


def fp8_weight(rows, columns, *, blocks):
    """Random e4m3 values with a scale for each row, or for each 128 columns of one."""
    weight = quantize_fp8(jax.random.normal(jax.random.key(rows), (rows, columns)))
    scales = jax.random.uniform(jax.random.key(1), (rows, -(-columns // 128)))
    return replace(weight, scales=scales) if blocks else weight


@pytest.mark.parametrize("blocks", [False, True])
def test_interpreted_fp8_kernel_matches_the_reference(blocks, interpreted_kernels):
    weight = fp8_weight(33, 160, blocks=blocks)
    assert_same_bits(dequantize(weight, jnp.float32), dequantize(weight, jnp.float32, backend="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_kernel_on_a_gpu_matches_the_reference(blocks):
    weight = fp8_weight(1001, 1120, blocks=blocks)
    got, expected = (dequantize(weight, backend=backend) for backend in ("triton", "reference"))
    np.testing.assert_array_equal(got.view(jnp.uint16), expected.view(jnp.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1000, 8, 4096])
def test_nf4_kernel_on_a_gpu_matches_the_reference(rows):
    weight = quantize_nf4(jax.random.normal(jax.random.key(rows), (rows, 4096)) * 0.02)
    got, expected = (dequantize(weight, backend=backend) for backend in ("triton", "reference"))
    np.testing.assert_array_equal(got.view(jnp.uint16), expected.view(jnp.uint16))


@pytest.mark.gpu
def test_mxfp4_kernel_on_a_gpu_matches_the_reference(mxfp4):
    got, expected = (dequantize(mxfp4, backend=backend) for backend in ("triton", "reference"))
    assert_same_bits(got.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.parametrize("capability", [HOPPER, (7, 5)], ids=["kernel", "XLA"])
def test_only_the_dequantized_weight_is_a_temporary(h200, capability):
    out, columns, tokens = 3072, 1024, 2048

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200)

    weight = jax.eval_shape(quantize_nf4, shaped(out, columns))
    weight = jax.tree.map(lambda part: shaped(*part.shape, dtype=part.dtype), weight)
    forward = jax.jit(lambda x, weight: project_quantized(x, weight))
    gradient = jax.jit(lambda x, weight, dy: jax.vjp(lambda x: project_quantized(x, weight), x)[1](dy))
    for step, inputs in [(forward, (columns,)), (gradient, (columns, out))]:
        x, *dy = (shaped(tokens, size) for size in inputs)
        with tracing_for(capability):
            compiled = step.lower(x, weight, *dy).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert temporary < 1.3 * 2 * out * columns, temporary / (2 * out * columns)
        assert ("triton_kernel_call" in compiled.as_text()) == (capability == HOPPER)


def test_int8_has_no_kernel():
    weight = quantize_int8(jnp.ones((2, 64)))
    assert DEQUANTIZE.choose(HOPPER, DequantizeCall(weight=weight)).name == "reference"
    with pytest.raises(ValueError, match="cannot serve this dequantization: weights of one byte have no kernel"):
        DEQUANTIZE.choose(HOPPER, DequantizeCall(weight=weight), backend="triton")
