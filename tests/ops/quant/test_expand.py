"""Expanding NF4 by our kernel: in Triton's interpreter, compiled for an H200, and on a GPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxglue.ops.quant import expand as expand_module
from jaxglue.ops.quant.expand import expand, project_quantized
from jaxglue.ops.quant.nf4 import dequantize, quantize_nf4


@pytest.fixture(scope="module")
def weight():
    """A matrix of bitsandbytes' golden: blocks of zeros, outliers, a last group of scales that is not full."""
    return quantize_nf4(jnp.asarray(load_file(Path(__file__).parents[1] / "goldens/nf4.safetensors")["weight"]))


@pytest.fixture
def on_kernels(interpreted, monkeypatch):
    """Makes `expand` run our kernels on the CPU."""
    from jaxglue.ops.quant.triton import TritonExpander

    monkeypatch.setattr(expand_module, "_expander", lambda: interpreted(TritonExpander)(compute_capability=90))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_kernel_gives_the_bits_of_the_reference(on_kernels, weight, dtype):
    np.testing.assert_array_equal(expand(weight, dtype=dtype), dequantize(weight, dtype))


def test_several_weights_are_written_one_below_the_other(on_kernels, weight):
    other = quantize_nf4(jax.random.normal(jax.random.key(0), (3, 128)))
    expected = np.concatenate([dequantize(w, jnp.float32) for w in (weight, other, weight)])
    np.testing.assert_array_equal(expand(weight, other, weight, dtype=jnp.float32), expected)


def test_the_reference_does_the_same(weight):
    expected = np.concatenate([dequantize(weight)] * 2)
    np.testing.assert_array_equal(expand(weight, weight).view(jnp.uint16), expected.view(np.uint16))


def test_weights_of_different_widths_are_refused(weight):
    with pytest.raises(ValueError, match=r"with one in, got \[\(130, 128\), \(2, 64\)\]"):
        expand(weight, quantize_nf4(jnp.ones((2, 64))))


@pytest.mark.parametrize("kernel", [True, False])
def test_on_a_gpu_only_the_expanded_weight_is_a_temporary(h200, monkeypatch, kernel):
    from jaxglue.ops.quant.triton import TritonExpander

    monkeypatch.setattr(expand_module, "_expander", lambda: TritonExpander(compute_capability=90) if kernel else None)
    out, columns, tokens = 3072, 1024, 2048

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200)

    weight = jax.eval_shape(quantize_nf4, shaped(out, columns))
    weight = jax.tree.map(lambda part: shaped(*part.shape, dtype=part.dtype), weight)
    gradient = jax.jit(lambda x, weight, dy: jax.vjp(lambda x: project_quantized(x, weight), x)[1](dy))
    # A function of its own: jit remembers what it traced.
    for step, inputs in [
        (jax.jit(lambda x, weight: project_quantized(x, weight)), (columns,)),
        (gradient, (columns, out)),
    ]:
        x, *dy = (shaped(tokens, size) for size in inputs)
        compiled = step.lower(x, weight, *dy).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert temporary < 1.3 * 2 * out * columns, temporary / (2 * out * columns)
        assert compiled.as_text().count("triton_kernel_call") >= kernel


def test_on_a_gpu_several_weights_are_expanded_in_place(h200, monkeypatch):
    from jaxglue.ops.quant.triton import TritonExpander

    monkeypatch.setattr(expand_module, "_expander", lambda: TritonExpander(compute_capability=90))
    weight = jax.eval_shape(quantize_nf4, jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16))
    weight = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=h200), weight)
    compiled = jax.jit(lambda *weights: expand(*weights)).lower(weight, weight, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 1024
    assert " copy(" not in compiled.as_text()


@pytest.mark.gpu
def test_kernel_on_a_gpu():
    weights = [quantize_nf4(jax.random.normal(jax.random.key(n), (n, 4096)) * 0.02) for n in (1000, 8, 4096)]
    expected = np.concatenate([dequantize(weight) for weight in weights])
    np.testing.assert_array_equal(jax.jit(expand)(*weights).view(jnp.uint16), expected.view(np.uint16))
