"""Collectives inside compiled programs: gather weights, reduce gradients, keep per-device arrays.

"Per device" functions run inside `per_device` and see local arrays; the others see global ones.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxglue.models.parameters import Params
from jaxglue.ops.collectives import divide_equally, per_device, reduce_scatter
from jaxglue.sharding.rules import Layout, is_tensor_parallel, param_name
from jaxglue.sharding.specs import axes_tuple, dimension_of, make_spec, spec_axes

_SMALL = 2**22
"""Most values of an array that travels with others."""


def gather(layout: Layout, shards: Any, specs: Any) -> Any:
    """Gather parameters stored as `specs` over `fsdp`, in `Layout.gathered_dtype`. Per device."""

    def whole(path, shard, spec):
        if "fsdp" not in spec_axes(spec):
            return shard
        shard = shard.astype(layout.gathered_dtype(path, shard.dtype))
        return jax.lax.all_gather(shard, "fsdp", axis=dimension_of(spec, "fsdp"), tiled=True)

    return jax.tree.map_with_path(whole, shards, specs)


def gather_alone(layout: Layout, shards: Any) -> Any:
    """Gather a layer's selected parameters by themselves: no layer before it could."""
    specs = layout.param_specs(shards)
    return per_device(partial(gather, layout, specs=specs), layout.mesh, (specs,), layout.gathered_specs(shards))(
        shards
    )


def select_to_gather(layout: Layout, tree: Any) -> Any:
    """Return the arrays that must be gathered before use, None in place of the others (or of all)."""
    if not layout.gathers:
        return None
    return jax.tree.map(lambda leaf, spec: leaf if "fsdp" in spec_axes(spec) else None, tree, layout.param_specs(tree))


def merge_gathered(gathered: Any, stored: Any) -> Any:
    """Return the stored tree with its gathered arrays replaced; the inverse of `select_to_gather`."""
    if gathered is None:
        return stored
    return jax.tree.map(
        lambda new, old: old if new is None else new, gathered, stored, is_leaf=lambda leaf: leaf is None
    )


def reduce_scatter_grads(layout: Layout, gradients: Any, specs: Any, prefix: str = "") -> Any:
    """Turn gradients of gathered parameters into float32 partials [1, …] of the stored shards. Per device."""

    def partial_sum(path, gradient, spec):
        if "fsdp" in spec_axes(spec):
            gradient = gradient.astype(layout.gathered_dtype(path, gradient.dtype))
            gradient = reduce_scatter(gradient, "fsdp", dimension_of(spec, "fsdp"))
        gradient = gradient.astype(jnp.float32)
        split = is_tensor_parallel(param_name(prefix, path))
        return (gradient if split else divide_equally(gradient, "tensor"))[None]

    return jax.tree.map_with_path(partial_sum, gradients, specs) if layout.mesh else gradients


def sum_partials(layout: Layout, partials: Any, prefix: str = "") -> Any:
    """Sum partial gradients [n, …] over n, into the parameters' shards.

    Small arrays that the same devices share travel as one: each exchange of its own would take longer to start.
    """
    leaves, treedef = jax.tree.flatten(partials)
    names = [param_name(prefix, path) for path, _ in jax.tree_util.tree_leaves_with_path(partials)]
    specs = [layout.spec(name, leaf.shape[1:]) for name, leaf in zip(names, leaves, strict=True)]
    axes = [layout.replicating_axes(spec) for spec in specs]

    def program(rows):
        return _sum_over([row[0] for row in rows], axes)

    rows = [make_spec([over, *map(axes_tuple, spec)]) for over, spec in zip(axes, specs, strict=True)]
    return jax.tree.unflatten(treedef, per_device(program, layout.mesh, (rows,), specs)(leaves))


def _sum_over(arrays: list[Array], axes: list[tuple[str, ...]]) -> list[Array]:
    """Sum each array over the devices along its axes. Per device."""
    sums = [
        array if not over or array.size <= _SMALL else jax.lax.psum(array, over)
        for array, over in zip(arrays, axes, strict=True)
    ]
    for over in {each for each in axes if each}:
        small = [i for i, each in enumerate(axes) if each == over and arrays[i].size <= _SMALL]
        if not small:
            continue
        whole = jax.lax.psum(jnp.concatenate([arrays[i].ravel() for i in small]), over)
        parts = jnp.split(whole, np.cumsum([arrays[i].size for i in small])[:-1])
        for i, part in zip(small, parts, strict=True):
            sums[i] = part.reshape(arrays[i].shape)
    return sums


def zero_partials(layout: Layout, tree: Any) -> Any:
    """Return zeros for accumulating the gradients of a tree: [n, …] on a mesh."""

    def zeros(leaf, spec):
        shape = (layout.shards(spec[0]) if spec else 1, *leaf.shape)
        return jax.lax.with_sharding_constraint(jnp.zeros(shape), layout.sharding(spec))

    if layout.mesh is None:
        return jax.tree.map(jnp.zeros_like, tree)
    return jax.tree.map(zeros, tree, layout.grad_specs(tree))


def constrain_params(layout: Layout, tree: Any, prefix: str = "") -> Any:
    """Constrain parameters or optimizer states to their shards."""
    if layout.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, layout.shardings(layout.param_specs(tree, prefix)))


def stack(layout: Layout, tree: Any) -> Any:
    """Add the leading axis of arrays [devices, …] to a device's own arrays. Per device."""
    return jax.tree.map(lambda leaf: leaf[None], tree) if layout.mesh else tree


def unstack(layout: Layout, tree: Any) -> Any:
    """Remove the leading axis that `stack` adds. Per device."""
    return jax.tree.map(lambda leaf: leaf[0], tree) if layout.mesh else tree


def schedule_after(first: Any, tree: Params) -> Params:
    """Delay a tree's arrays until `first` exists.

    XLA would otherwise gather at the end of a program, where gradients are sent.
    """
    if not jax.tree.leaves(first):
        return tree
    return jax.tree.map(lambda leaf: jax.lax.optimization_barrier((leaf, first))[0], tree)
