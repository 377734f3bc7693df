"""Mamba-2 where rows are split over devices: a state passes from token to token, so heads are split instead.

Devices exchange tokens for heads before the convolution, as the delta rule's do (`ops/delta_rule/split.py`). Where a
group's heads are several devices', each has its B and C whole; their gradients are summed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.collectives import axis_size
from jaxglue.ops.row_split import CONTEXT, to_heads, whole_rows
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.state_space.reference import StateHeads


def why_no_split(heads: StateHeads, devices: int) -> str | None:
    """Return why so many devices cannot split these heads, in words; None where they can."""
    if heads.values % devices:
        return f"its {heads.values} heads do not divide among {devices} GPUs of context"
    if heads.groups % devices and devices % heads.groups:
        return f"neither divide its {heads.groups} groups among {devices} GPUs of context, nor these among the groups"
    return None


def own_heads(heads: StateHeads) -> StateHeads:
    """Return the sizes of this device's heads. Per device."""
    parts = axis_size(CONTEXT)
    return heads._replace(values=heads.values // parts, groups=max(heads.groups // parts, 1))


def exchange_tokens(xbc: Float[Array, "B T/M W"], segments: PackedSegments, heads: StateHeads) -> Array:
    """Return whole rows [B, T, W'] of this device's heads and their groups. Per device."""
    parts, split = axis_size(CONTEXT), segments.split
    assert split is not None
    x, b, c = (y.reshape(*y.shape[:2], -1) for y in heads.split(xbc))
    if heads.groups % parts == 0:
        by_device = (y.reshape(*y.shape[:2], parts, -1) for y in (x, b, c))
        return to_heads(jnp.concatenate([*by_device], axis=-1).reshape(xbc.shape), split)
    groups = whole_rows(jnp.concatenate([b, c], axis=-1), split)
    own = own_group(groups.reshape(*groups.shape[:2], 2, heads.groups, -1), 3)
    return jnp.concatenate([to_heads(x, split), own.reshape(*own.shape[:2], -1)], axis=-1)


def own_channels(values: Float[Array, "W *V"], heads: StateHeads) -> Float[Array, "W/M *V"]:
    """Return values of this device's channels, from those of all. Per device."""
    parts, ends = axis_size(CONTEXT), (heads.value_width, heads.value_width + heads.group_width)
    x, b, c = jnp.split(values, ends)
    x = own_part(x)
    if heads.groups % parts == 0:
        return jnp.concatenate([x, own_part(b), own_part(c)])
    b, c = (own_group(y.reshape(heads.groups, -1, *y.shape[1:]), 0)[0] for y in (b, c))
    return jnp.concatenate([x, b, c])


def own_part(values: Float[Array, "N *V"]) -> Float[Array, "N/M *V"]:
    """Return this device's part of values of all heads, or of all groups. Per device."""
    return values.reshape(axis_size(CONTEXT), -1, *values.shape[1:])[jax.lax.axis_index(CONTEXT)]


def own_group(values: Array, axis: int) -> Array:
    """Return those of the group of this device's heads, from all groups' along an axis. Per device."""
    group = jax.lax.axis_index(CONTEXT) // (axis_size(CONTEXT) // values.shape[axis])
    return jax.lax.dynamic_slice_in_dim(values, group, 1, axis)
