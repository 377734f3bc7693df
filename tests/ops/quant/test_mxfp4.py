"""MXFP4 against its definition, value by value."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.moe import grouped_matmul
from jaxglue.ops.quant import DEQUANTIZE, mxfp4_to_fp8
from jaxglue.ops.quant.mxfp4 import MXFP4, dequantize_mxfp4, quantize_mxfp4

E2M1 = {
    "0000": 0.0, "0001": 0.5, "0010": 1.0, "0011": 1.5, "0100": 2.0, "0101": 3.0, "0110": 4.0, "0111": 6.0,
    "1000": -0.0, "1001": -0.5, "1010": -1.0, "1011": -1.5, "1100": -2.0, "1101": -3.0, "1110": -4.0, "1111": -6.0,
}  # fmt: skip


def random_tensor(shape=(3, 5, 4), seed=0):
    """Draw [3, 5, 128] in blocks of 32, with scales from 2^-125 to 2^125."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
    return MXFP4(blocks=jnp.asarray(blocks), scales=jnp.asarray(rng.integers(2, 253, shape, dtype=np.uint8)))


def decode(tensor):
    """Compute the definition in Python floats: low half first, then high; times 2^(s − 127)."""
    out = np.empty(tensor.shape, np.float64)
    for index in np.ndindex(*tensor.scales.shape):
        values = []
        for byte in np.asarray(tensor.blocks[index]):
            bits = f"{byte:08b}"
            values += [E2M1[bits[4:]], E2M1[bits[:4]]]
        block = slice(32 * index[-1], 32 * index[-1] + 32)
        out[(*index[:-1], block)] = np.array(values) * 2.0 ** (int(tensor.scales[index]) - 127)
    return out


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dequantize_is_exact(dtype):
    tensor = random_tensor()
    got, expected = dequantize_mxfp4(tensor, dtype), decode(tensor)
    np.testing.assert_array_equal(np.asarray(got, np.float64), expected)
    np.testing.assert_array_equal(np.signbit(np.asarray(got, np.float64)), np.signbit(expected))


def test_quantizing_values_in_mxfp4_keeps_them():
    rng = np.random.default_rng(0)
    blocks = jnp.asarray(rng.integers(0, 256, (6, 4, 16), dtype=np.uint8))
    stored = MXFP4(blocks=blocks, scales=jnp.asarray(rng.integers(100, 140, (6, 4), dtype=np.uint8)))
    values = dequantize_mxfp4(stored, jnp.float32)
    np.testing.assert_array_equal(dequantize_mxfp4(quantize_mxfp4(values), jnp.float32), values)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-30, 0.0])
def test_quantized_values_are_the_nearest(scale):
    values = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32) * np.float32(scale)
    quantized = quantize_mxfp4(jnp.asarray(values))
    found = np.asarray(dequantize_mxfp4(quantized, jnp.float32))
    steps = np.exp2(np.asarray(quantized.scales, np.float64) - 127).repeat(32, axis=-1)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.concatenate([-grid, grid])[:, None, None] * steps
    np.testing.assert_allclose(np.abs(found - values), np.abs(grid - values).min(axis=0), rtol=1e-5, atol=1e-45)
    largest = np.abs(values.reshape(8, 2, 32)).max(axis=-1) / steps.reshape(8, 2, 32)[..., 0]
    assert ((largest >= 4) & (largest < 8)).all() or scale == 0


def test_every_byte_decodes_and_scale_255_is_nan():
    blocks = jnp.arange(256, dtype=jnp.uint8).reshape(16, 16)
    tensor = MXFP4(blocks=blocks, scales=jnp.full(16, 127, jnp.uint8))
    np.testing.assert_array_equal(np.asarray(dequantize_mxfp4(tensor, jnp.float32)), decode(tensor))
    broken = MXFP4(blocks=blocks, scales=jnp.full(16, 255, jnp.uint8))
    assert np.isnan(np.asarray(dequantize_mxfp4(broken, jnp.float32))).all()


def test_grouped_matmul_accepts_mxfp4():
    tensor = MXFP4(blocks=random_tensor().blocks, scales=jnp.full((3, 5, 4), 120, jnp.uint8))
    lhs = jnp.asarray(np.random.default_rng(1).standard_normal((10, 128)), jnp.float32)
    sizes = np.array([4, 0, 6])
    got = grouped_matmul(lhs, tensor, sizes, transpose_rhs=True)
    expected = grouped_matmul(lhs, dequantize_mxfp4(tensor, jnp.float32), sizes, transpose_rhs=True)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": jnp.zeros((3, 5, 3, 16), jnp.uint8)}, r"blocks must be \[3, 5, 4, 16\].*truncated"),
        ({"scales": jnp.zeros((2, 5, 4), jnp.uint8)}, r"blocks must be \[2, 5, 4, 16\]"),
        ({"scales": jnp.zeros((3, 5, 4))}, "scales must be uint8, got float32"),
    ],
)
def test_truncated_tensor_is_refused(change, message):
    tensor = random_tensor()
    with pytest.raises(ValueError, match=message):
        dequantize_mxfp4(MXFP4(**{"blocks": tensor.blocks, "scales": tensor.scales} | change))


def near_tensor(shape=(3, 5, 4)):
    """Draw matrices whose blocks are within 2^14 of their largest."""
    rng, tensor = np.random.default_rng(0), random_tensor(shape)
    scales = rng.integers(100, 115, shape, dtype=np.uint8) + (20 * np.arange(shape[0], dtype=np.uint8))[:, None, None]
    return MXFP4(blocks=tensor.blocks, scales=jnp.asarray(scales))


@pytest.mark.parametrize("transposed", [False, True])
def test_fp8_holds_mxfp4_exactly(transposed):
    codes, factors = mxfp4_to_fp8(near_tensor(), transposed=transposed)
    values = np.asarray(codes, np.float64) * np.asarray(factors, np.float64)[:, None, None]
    np.testing.assert_array_equal(values.swapaxes(1, 2) if transposed else values, decode(near_tensor()))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tensor", [near_tensor(), near_tensor((2, 37, 5))], ids=["small", "odd"])
def test_interpreted_kernel_writes_the_same_codes(interpreted, transposed, tensor):
    from jaxglue.ops.quant.triton import TritonDequantize

    expected = mxfp4_to_fp8(tensor, transposed=transposed, backend="reference")
    with DEQUANTIZE.using(interpreted(TritonDequantize)(compute_capability=90)):
        got = mxfp4_to_fp8(tensor, transposed=transposed)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
