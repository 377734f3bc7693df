"""NF4 against bitsandbytes, bit for bit."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxglue.ops.quant.blocks import dynamic_code
from jaxglue.ops.quant.nf4 import NF4, dequantize_nf4, quantize_nf4

PARTS = ("codes", "scales", "scale_absmax", "scale_offset")


@pytest.fixture(scope="module")
def golden():
    return load_file(Path(__file__).parents[2] / "goldens/nf4.safetensors")


@pytest.fixture(scope="module")
def stored(golden):
    """The golden weight as bitsandbytes stores it."""
    return NF4(**{name: jnp.asarray(golden[name]) for name in PARTS}, dtype=jnp.dtype(jnp.float16))


def test_quantize_matches_bitsandbytes_bit_for_bit(golden):
    np.testing.assert_array_equal(dynamic_code(), golden["scale_code"])
    quantized = quantize_nf4(jnp.asarray(golden["weight"]))
    for name in PARTS:
        np.testing.assert_array_equal(getattr(quantized, name), golden[name], err_msg=name)
    assert (quantized.shape, quantized.dtype) == ((130, 128), jnp.float16)


def test_dequantize_matches_bitsandbytes_bit_for_bit(golden, stored):
    values = np.asarray(dequantize_nf4(stored, jnp.float32))
    np.testing.assert_array_equal(values[:8], golden["first_rows"])
    np.testing.assert_array_equal(values[-8:], golden["last_rows"])
    bits = np.asarray(dequantize_nf4(stored, jnp.bfloat16))[:8].view(np.uint16)
    np.testing.assert_array_equal(bits, golden["first_rows_bfloat16"])


def test_row_length_must_be_a_multiple_of_the_block():
    with pytest.raises(ValueError, match=r"rows that are a multiple of 64 values long, got \[4, 96\]"):
        quantize_nf4(jnp.zeros((4, 96)))
