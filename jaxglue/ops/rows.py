"""Rows of a table by index, with a gradient that is the same to the bit in every run."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.custom_vjp
def take_rows(table: Float[Array, "V D"], indices: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Return the rows of these indices, all below V. JAX's own transpose would be a scatter with atomics."""
    return jnp.take(table, indices, axis=0)


def sum_rows(rows: Float[Array, "N D"], indices: Int[Array, " N"], size: int) -> Float[Array, "size D"]:
    """Sum the rows of each index, pairwise in the order of the rows."""
    order = jnp.argsort(indices, stable=True)
    indices = jnp.asarray(indices)[order]
    differs = indices[1:] != indices[:-1]
    begins, ends = jnp.pad(differs, (1, 0), constant_values=True), jnp.pad(differs, (0, 1), constant_values=True)
    _, sums = jax.lax.associative_scan(_add_segments, (begins[:, None], rows[order]))
    return jnp.zeros((size, rows.shape[1]), rows.dtype).at[jnp.where(ends, indices, size)].set(sums, mode="drop")


Segment = tuple[Bool[Array, "N 1"], Float[Array, "N D"]]
"""Flags of runs of rows where an index begins, and the sums of each run's rows of its last index."""


def _add_segments(first: Segment, second: Segment) -> Segment:
    return first[0] | second[0], jnp.where(second[0], second[1], first[1] + second[1])


def _forward(table: Array, indices: Array) -> tuple[Array, tuple[Array, Array]]:
    return take_rows(table, indices), (indices, table[:, :0])


def _backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    indices, empty = saved
    rows = gradient.reshape(-1, gradient.shape[-1])
    return sum_rows(rows, indices.reshape(-1), len(empty)), None


take_rows.defvjp(_forward, _backward)
