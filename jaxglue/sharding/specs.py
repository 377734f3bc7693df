"""Operations on partition specs."""

from collections.abc import Iterable

from jax.sharding import PartitionSpec

Axes = str | tuple[str, ...] | None
"""The axes that split one dimension, as JAX writes them."""


def axes_tuple(axes: Axes) -> tuple[str, ...]:
    """Return the axes of one dimension as a tuple."""
    return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def spec_axes(spec: PartitionSpec) -> set[str]:
    """Return all axes of a spec."""
    return {axis for axes in spec for axis in axes_tuple(axes)}


def dimension_of(spec: PartitionSpec, axis: str) -> int:
    """Return the dimension that an axis splits."""
    return next(i for i, axes in enumerate(spec) if axis in axes_tuple(axes))


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """Return the spec after gathering over an axis."""
    return make_spec(tuple(a for a in axes_tuple(axes) if a != axis) for axes in spec)


def make_spec(dimensions: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """Build the spec in JAX's canonical form: single axes without a tuple, trailing unsplit dimensions dropped."""
    axes = [names[0] if len(names) == 1 else names or None for names in dimensions]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)
