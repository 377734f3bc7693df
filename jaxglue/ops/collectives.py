"""Programs of a single device on a mesh: what runs inside sees local arrays, and names axes to speak to the others."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PRNGKeyArray

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes over which the rows of a batch are spread."""


def per_device[**Arguments, Result](
    function: Callable[Arguments, Result], mesh: Mesh | AbstractMesh | None, in_specs: Any, out_specs: Any
) -> Callable[Arguments, Result]:
    """The function run by every device on its own parts of the arguments; the function itself without a mesh.

    Inside, arrays are local and there is nothing to partition, so kernels of Triton and cuDNN need no rules.
    """
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def axis_size(*axes: str) -> int:
    """Devices along these axes, to be asked inside `per_device`; 1 elsewhere."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes if axis in mesh.manual_axes)


def psum(x: Array, *axes: str) -> Array:
    """The sum over the devices along these axes, inside `per_device`; x elsewhere."""
    return jax.lax.psum(x, axes) if axis_size(*axes) > 1 else x


def all_rows(x: Array) -> Array:
    """The sum over all devices' rows, inside `per_device`, differentiable to this device's term alone; x elsewhere."""
    return x + jax.lax.stop_gradient(psum(x, *BATCH_AXES) - x) if axis_size(*BATCH_AXES) > 1 else x


def reduce_scatter(x: Array, axis: str, dimension: int) -> Array:
    """This device's part, along a dimension, of the sum over the devices along an axis, in float32.

    To be asked inside `per_device`. Parts travel in x's dtype and are added up where they arrive: a reduce-scatter in
    bfloat16 would round at every device on the way, and one in float32 send twice as much.
    """
    parts = jax.lax.all_to_all(x, axis, dimension, dimension, tiled=True)
    before, after = parts.shape[:dimension], parts.shape[dimension + 1 :]
    return parts.reshape(*before, axis_size(axis), -1, *after).sum(dimension, dtype=jnp.float32)


def share(x: Array, *axes: str) -> Array:
    """An equal part of what all devices along these axes have computed alike, inside `per_device`; x elsewhere."""
    size = axis_size(*axes)
    return x / size if size > 1 else x


def copy_to(x: Array) -> Array:
    """x, the same on all devices along `tensor`, each of which computes one term of what follows (Megatron's f)."""
    return _copy_to(x) if axis_size("tensor") > 1 else x


def reduce_from(y: Array) -> Array:
    """The sum of the terms of the devices along `tensor`, the same on all of them (Megatron's g, arXiv 1909.08053)."""
    return _reduce_from(y) if axis_size("tensor") > 1 else y


@jax.custom_vjp
def _copy_to(x):
    return x


@jax.custom_vjp
def _reduce_from(y):
    return jax.lax.psum(y, "tensor")


# JAX would not know that what follows a sum, or comes before a copy, is the same on all devices.
_copy_to.defvjp(lambda x: (x, None), lambda _, dx: (jax.lax.psum(dx, "tensor"),))
_reduce_from.defvjp(lambda y: (_reduce_from(y), None), lambda _, dy: (dy,))


def own_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """A key of this device's rows alone, inside `per_device`; the key itself elsewhere."""
    return jax.random.fold_in(key, jax.lax.axis_index(BATCH_AXES)) if axis_size(*BATCH_AXES) > 1 else key
