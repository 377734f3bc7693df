"""Weights drawn alike by the makers of goldens and by tests, so that goldens need not hold them. NumPy alone."""

import zlib

import numpy as np


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the named parameter in float32: non-uniform attention, and non-trivial norms and biases."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    return 1 + 0.2 * noise if name.endswith(("norm.weight", "layer_scalar")) else 0.3 * noise


def probes(name: str, gradient: np.ndarray) -> np.ndarray:
    """Return eight sums of a gradient's entries with random signs, over √8: their distance is about the gradients'."""
    signs = np.random.default_rng(zlib.crc32(name.encode())).choice([-1.0, 1.0], (8, gradient.size))
    return (signs @ np.asarray(gradient, np.float64).ravel() / 8**0.5).astype(np.float32)
