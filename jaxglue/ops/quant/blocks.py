"""Block-wise quantization to the nearest value of a table, and the dynamic 8-bit types."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8


def dynamic_code(*, signed: bool = True) -> Float[np.ndarray, "256"]:
    """Return the 256 values of the dynamic 8-bit type (arXiv 2110.02861): a power of ten times a linear fraction."""
    finest = 6 if signed else 7  # without a sign, its bit goes to the fraction
    magnitudes = [np.float32(10.0**exponent) * _fractions(2 ** (exponent + finest)) for exponent in range(-6, 1)]
    positive = np.concatenate([*magnitudes, np.array([0, 1], np.float32)])
    return np.sort(np.concatenate([-positive[:-2], positive]) if signed else positive)


def _fractions(count: int) -> Float[np.ndarray, " count"]:
    """Return the midpoints of equal parts of [0.1, 1], with bounds from the nearer end, as PyTorch's linspace has."""
    low, index = np.float64(np.float32(0.1)), np.arange(count + 1)
    step = np.float64(np.float32((1 - low) / count))
    bounds = np.where(index < (count + 1) // 2, low + step * index, 1 - step * (count - index)).astype(np.float32)
    return (bounds[:-1] + bounds[1:]) / np.float32(2)


def nearest(values: Float[Array, "*B n"], code: np.ndarray) -> tuple[UInt8[Array, "*B n"], Float[Array, "*B"]]:
    """Return (index of the code nearest to each value relative to its row's largest magnitude, those magnitudes)."""
    absmax = jnp.abs(values).max(axis=-1)
    scaled = jnp.clip(values * (1 / jnp.where(absmax > 0, absmax, 1))[..., None], -1, 1)
    method = "compare_all" if code.size <= 16 else "scan_unrolled"
    return jnp.searchsorted(midpoints(code), scaled, method=method).astype(jnp.uint8), absmax


def midpoints(code: np.ndarray) -> np.ndarray:
    """Return the decision boundaries between consecutive values of a table."""
    return (code[:-1] + code[1:]) / np.float32(2)
