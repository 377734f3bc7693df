"""NF4 against bitsandbytes, bit for bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxglue.quant.nf4 import NF4, dequantise, dynamic_code, project_nf4, quantise_nf4

PARTS = ("codes", "scales", "scale_absmax", "scale_offset")


@pytest.fixture(scope="module")
def golden():
    return load_file(Path(__file__).parents[1] / "goldens/nf4.safetensors")


@pytest.fixture(scope="module")
def stored(golden):
    """The golden's own parts."""
    return NF4(**{name: jnp.asarray(golden[name]) for name in PARTS}, dtype=jnp.dtype(jnp.float16))


def test_quantising_gives_the_bits_of_bitsandbytes(golden):
    np.testing.assert_array_equal(dynamic_code(), golden["scale_code"])
    quantised = quantise_nf4(jnp.asarray(golden["weight"]))
    for name in PARTS:
        np.testing.assert_array_equal(getattr(quantised, name), golden[name], err_msg=name)
    assert (quantised.shape, quantised.dtype) == ((130, 128), jnp.float16)


def test_expanding_gives_the_bits_of_bitsandbytes(golden, stored):
    values = np.asarray(dequantise(stored, jnp.float32))
    np.testing.assert_array_equal(values[:8], golden["first_rows"])
    np.testing.assert_array_equal(values[-8:], golden["last_rows"])
    bits = np.asarray(dequantise(stored, jnp.bfloat16))[:8].view(np.uint16)
    np.testing.assert_array_equal(bits, golden["first_rows_bfloat16"])


def test_rows_that_blocks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"rows that are a multiple of 64 values long, got \[4, 96\]"):
        quantise_nf4(jnp.zeros((4, 96)))


def test_on_a_gpu_only_the_expanded_weight_is_a_temporary(h200):
    out, columns, tokens = 3072, 1024, 2048

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200)

    weight = jax.eval_shape(quantise_nf4, shaped(out, columns))
    weight = jax.tree.map(lambda part: shaped(*part.shape, dtype=part.dtype), weight)
    gradient = jax.jit(lambda x, weight, dy: jax.vjp(lambda x: project_nf4(x, weight), x)[1](dy))
    for step, inputs in [(jax.jit(project_nf4), (columns,)), (gradient, (columns, out))]:
        x, *dy = (shaped(tokens, size) for size in inputs)
        temporary = step.lower(x, weight, *dy).compile().memory_analysis().temp_size_in_bytes
        assert temporary < 1.3 * 2 * out * columns, temporary / (2 * out * columns)
