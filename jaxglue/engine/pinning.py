"""Pinned host memory in the size that is needed."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxglue.engine.transfer import pinned_host

_ROW = 2**20
"""Bytes of a row of the array that `pin` allocates."""


def pin(size: int) -> None:
    """Take bytes of pinned memory into the pool of JAX as one region, in whole MiB: an array that is never written."""
    row = jnp.zeros((1, _ROW), jnp.uint8)
    host = pinned_host(jax.local_devices()[0])
    jax.block_until_ready(jax.jit(partial(_unwritten, size // _ROW), out_shardings=host)(row))


def _unwritten(rows: int, row: jax.Array) -> jax.Array:
    """Return rows in host memory of which one is written; XLA allocates the others without a value."""
    host = jax.memory.Space.Host
    array = jax.device_put(jnp.zeros((rows, row.size), row.dtype), host)
    return jax.lax.dynamic_update_slice(array, jax.device_put(row, host), (0, 0))
