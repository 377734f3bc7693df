"""Single-device programs on a mesh, and the collectives inside them; outside of `per_device` these are the identity."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PRNGKeyArray

from jaxglue.ops.backend import one_device_each

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that split the rows of a batch."""
TOKEN_AXES = (*BATCH_AXES, "context")
"""Mesh axes that split its tokens: rows, and the tokens of each."""


def per_device[**Arguments, Result](
    function: Callable[Arguments, Result], mesh: Mesh | AbstractMesh | None, in_specs: Any, out_specs: Any
) -> Callable[Arguments, Result]:
    """Run the function on every device with its local parts of the arguments; without a mesh return it unchanged.

    Arrays inside are local, so Triton and cuDNN kernels need no partitioning rules.
    """
    if mesh is None:
        return function
    local = one_device_each()(function)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def axis_size(*axes: str) -> int:
    """Return the number of devices along these axes; 1 outside of `per_device`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes if axis in mesh.manual_axes)


def psum(x: Array, *axes: str) -> Array:
    """Sum x over the devices along these axes."""
    return jax.lax.psum(x, axes) if axis_size(*axes) > 1 else x


def all_gather(x: Array, *axes: str) -> Array:
    """Return x of all devices along these axes, one after the other."""
    return jax.lax.all_gather(x, axes, tiled=True) if axis_size(*axes) > 1 else x


def psum_batch(x: Array) -> Array:
    """Sum x over all devices' tokens; the gradient flows to this device's term only."""
    return x + jax.lax.stop_gradient(psum(x, *TOKEN_AXES) - x) if axis_size(*TOKEN_AXES) > 1 else x


def reduce_scatter(x: Array, axis: str, dimension: int) -> Array:
    """Sum x over the devices along an axis and return this device's part along a dimension, in float32.

    Parts travel in x's dtype and are added on arrival: a bfloat16 reduce-scatter rounds at every device on the way, a
    float32 one sends twice the bytes.
    """
    parts = jax.lax.all_to_all(x, axis, dimension, dimension, tiled=True)
    before, after = parts.shape[:dimension], parts.shape[dimension + 1 :]
    return parts.reshape(*before, axis_size(axis), -1, *after).sum(dimension, dtype=jnp.float32)


def divide_equally(x: Array, *axes: str) -> Array:
    """Divide x, the same on all devices along these axes, by their number, for a later sum over them."""
    size = axis_size(*axes)
    return x / size if size > 1 else x


def copy_to(x: Array) -> Array:
    """Return x, the same on all devices along `tensor`; sum its gradient over them (Megatron's f, arXiv 1909.08053)."""
    return _copy_to(x) if axis_size("tensor") > 1 else x


def reduce_from(y: Array, axis: str = "tensor") -> Array:
    """Sum y over the devices along an axis; pass its gradient on unchanged (Megatron's g, arXiv 1909.08053)."""
    return _reduce_from(axis, y) if axis_size(axis) > 1 else y


@jax.custom_vjp
def _copy_to(x):
    return x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce_from(axis, y):
    return jax.lax.psum(y, axis)


# JAX cannot know that x and the sum are the same on all devices.
_copy_to.defvjp(lambda x: (x, None), lambda _, dx: (jax.lax.psum(dx, "tensor"),))
_reduce_from.defvjp(lambda axis, y: (_reduce_from(axis, y), None), lambda _axis, _, dy: (dy,))


def device_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """Return a key for this device's tokens."""
    return jax.random.fold_in(key, jax.lax.axis_index(TOKEN_AXES)) if axis_size(*TOKEN_AXES) > 1 else key
