"""Comparison of kernels with their definitions."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.engine.compiler import jit_step


def outputs_and_gradients(function, arguments, cotangents) -> list[jax.Array]:
    """Return a function's outputs and the gradients to all arguments, in float32."""

    @jit_step  # operation by operation, compiling takes longest
    def compute(arguments, cotangents):
        outputs, pull = jax.vjp(function, *arguments)
        return [x.astype(jnp.float32) for x in jax.tree.leaves((outputs, pull(cotangents)))]

    return compute(arguments, cotangents)


def assert_close(got, expected, tolerance) -> None:
    """Assert ‖got − expected‖ ≤ tolerance·‖expected‖ for every array."""
    for a, b in zip(got, expected, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)
