"""Sums of rows whose order on a CPU depends neither on the number of rows nor on what XLA fuses with them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEWEST_ROWS = 2
"""Rows from which XLA's products on a CPU sum in one order: a single one is another function's."""


def row_sums(values: Float[Array, "*B n"]) -> Float[Array, "*B"]:
    """Sum the last axis in float32 by a product with ones: XLA's reductions have an order in each fusion."""
    rows = values.astype(jnp.float32).reshape(-1, values.shape[-1])
    padded = jnp.pad(rows, ((0, max(FEWEST_ROWS - len(rows), 0)), (0, 0)))
    ones = jnp.ones((rows.shape[1], 2), jnp.float32)
    totals = jnp.matmul(jax.lax.optimization_barrier(padded), ones, precision=jax.lax.Precision.HIGHEST)
    return totals[: len(rows), 0].reshape(values.shape[:-1])
