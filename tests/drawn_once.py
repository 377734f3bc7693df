"""Random arrays of any shape by a few programs: to compile one for each shape is a twentieth of the tests' time."""

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax._src.core import trace_state_clean

from jaxglue.hf import loading

_SIZES = 1024, 65536
"""Bounds of the powers of two: larger arrays are of tests on GPUs, and stay there."""


def share_draws() -> None:
    """Let normal and uniform arrays be the first ones of a power of two of values.

    JAX counts the values of an array, whatever its shape: these are the same bits.
    """
    for module, name in ((jax.random, "normal"), (jax.random, "uniform"), (loading, "_normal")):
        setattr(module, name, _first_of_many(getattr(module, name)))


def _first_of_many(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    @functools.wraps(draw)
    def drawn(key: jax.Array, shape: int | tuple[int, ...] = (), *arguments, **options) -> jax.Array:
        size = shape if isinstance(shape, int) else math.prod(shape)
        if not 1 < size <= _SIZES[1] or not trace_state_clean():
            return draw(key, shape, *arguments, **options)
        many = draw(key, (max(_SIZES[0], 1 << (size - 1).bit_length()),), *arguments, **options)
        return jax.device_put(np.asarray(many)[:size].reshape(shape))

    return drawn
