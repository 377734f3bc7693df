"""What of a model is split over which axes of a mesh: the partition rules, and what follows from them."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import hf_name
from jaxglue.ops.collectives import BATCH_AXES, per_device, reduce_scatter, share
from jaxglue.sharding.mesh import put_whole

RULES: tuple[tuple[str, P], ...] = (
    # parameter                                                     axes that split each of its dimensions
    (r"experts\.\w+_proj(_blocks|_scales)?$",                       P("expert", "fsdp")),  # [E, ·, ·]
    (r"experts\.\w+_proj(_bias|\.lora_A|\.lora_B)$",                P("expert")),
    (r"(embed_tokens|lm_head)\.weight$",                            P("fsdp")),  # [V, D]
    (r"\.(q|k|v|gate|up)_proj\.weight(\.codes|\.scales|\.absmax)?$", P(("tensor", "fsdp"))),  # [out, in]
    (r"\.(o|down)_proj\.weight(\.codes|\.scales|\.absmax)?$",       P("fsdp", "tensor")),
    (r"\.(q|k|v|gate|up)_proj\.(bias|lora_B)$|\.sinks$",            P("tensor")),
    (r"\.(o|down)_proj\.lora_A$",                                   P(None, "tensor")),
    (r"",                                                           P()),
)  # fmt: skip
"""The first pattern found in a parameter's name decides; its gradient and optimizer states are split as it is."""

_IN_PARALLEL = re.compile(r"(^|\.)(self_attn|mlp)\.")
"""Modules inside which every device along `tensor` computes a part; outside, they all compute the same."""


class Layout:
    """The rules applied to one mesh; without one (None), everything is whole and functions stay as they are.

    Args:
        mesh: of the axes of `MeshShape`.
        dtype: of gathered weights; what trains is gathered in it rather than in float32.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None, dtype=jnp.float32):
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        self._sizes = dict(self.mesh.shape) if self.mesh else {}
        self._axes = tuple(axis for axis, size in self._sizes.items() if size > 1)
        self.dtype = jnp.dtype(dtype)
        self.batch_spec = _short([tuple(axis for axis in BATCH_AXES if axis in self._axes)])
        """Of arrays [B, …]."""
        self.every = _short([self._axes])
        """Of arrays [devices, …], a part for each device."""

    def size(self, axis: str) -> int:
        """Devices along an axis."""
        return self._sizes.get(axis, 1)

    @property
    def gathers(self) -> bool:
        """Whether weights are stored in parts that are gathered to be used."""
        return "fsdp" in self._axes

    def run(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """The function run by every device on its own parts (`per_device`)."""
        return per_device(function, self.mesh, in_specs, out_specs)

    def sharding(self, spec: P) -> NamedSharding | None:
        """A spec on this mesh; None without one."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """A tree of specs on this mesh; None without one."""
        return None if self.mesh is None else jax.tree.map(partial(NamedSharding, self.mesh), specs)

    def param_specs(self, tree: Any, prefix: str = "") -> Any:
        """The spec of every parameter of a tree, and of its optimizer state, by name and shape."""
        return jax.tree.map_with_path(lambda path, leaf: self.spec(_name(prefix, path), leaf.shape), tree)

    def gathered_specs(self, tree: Any, prefix: str = "") -> Any:
        """The specs of the parameters as programs take them: gathered over `fsdp`."""
        return jax.tree.map(lambda spec: _without(spec, "fsdp"), self.param_specs(tree, prefix))

    def grad_specs(self, tree: Any, prefix: str = "") -> Any:
        """The specs of gradients [n, …], whose sum over n is due: n devices have the same part of the parameter."""
        return jax.tree.map(
            lambda spec: _short([self._sharing(spec), *map(_tuple, spec)]), self.param_specs(tree, prefix)
        )

    def place(self, name: str, value: Any) -> Any:
        """The sharding of the parameter of this name, or of each part of its value; None without a mesh."""
        return self.shardings(self.param_specs(value, name))

    def put(self, tree: Any) -> Any:
        """The parameters in their places on the mesh."""
        return put_whole(tree, self.shardings(self.param_specs(tree))) if self.mesh else tree

    def constrain(self, tree: Any, prefix: str = "") -> Any:
        """In a program of all devices: the parameters, or optimizer states, made in their places."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.shardings(self.param_specs(tree, prefix)))

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        """Which axes split the parameter of this name. An axis that does not divide a dimension leaves it whole."""
        dimensions = zip(self.rule(name), shape, strict=False)
        return _short(self._dividing(axes, size) for axes, size in dimensions)

    def rule(self, name: str) -> P:
        """The axes of `RULES` for the parameter of this name."""
        return next(spec for pattern, spec in RULES if re.search(pattern, name))

    def axes(self, spec: P) -> list[str]:
        """The axes of a spec in the mesh's order."""
        return [axis for axis in self._sizes if axis in _axes(spec)]

    def copies(self, spec: P) -> int:
        """Devices that hold the same part."""
        return math.prod(self._sizes[axis] for axis in self._sharing(spec))

    def gathered_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype in which parts of parameters are gathered."""
        return self.dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(dtype)

    def context(self, context: PackedContext) -> Any:
        """The specs of what a layer is given beside its input."""
        router_losses: Any = None if context.router_losses is None else P()
        key: Any = None if context.dropout_key is None else P()
        rows: Any = {"segments": self.batch_spec, "cos": self.batch_spec, "sin": self.batch_spec}
        return dataclasses.replace(context, **rows, dropout_key=key, router_losses=router_losses)

    def in_parts(self, tree: Any) -> Any:
        """Those of a tree's arrays that must be gathered before they are used, None for the others."""
        if not self.gathers:
            return None
        return jax.tree.map(lambda leaf: leaf if "fsdp" in _axes(leaf.sharding.spec) else None, tree)

    def whole(self, gathered: Any, stored: Any) -> Any:
        """The tree `stored` with what was gathered of it (see `in_parts`) in its place."""
        if gathered is None:
            return stored
        return jax.tree.map(lambda new, old: old if new is None else new, gathered, stored, is_leaf=_is_none)

    def local(self, tree: Any, specs: Any) -> Any:
        """Shapes and dtypes of a device's parts."""

        def part(leaf, spec):
            counts = [math.prod(self._sizes[axis] for axis in _tuple(axes)) for axes in spec]
            counts += [1] * (leaf.ndim - len(counts))
            return jax.ShapeDtypeStruct([n // count for n, count in zip(leaf.shape, counts, strict=True)], leaf.dtype)

        return jax.tree.map(part, tree, specs)

    def gathered(self, tree: Any) -> Any:
        """Shapes and dtypes of what a device gathers of a tree, None for what it need not."""

        def whole(leaf, spec):
            if "fsdp" not in _axes(spec):
                return None
            return jax.ShapeDtypeStruct(leaf.shape, self.gathered_dtype(leaf.dtype))

        specs = self.param_specs(tree)
        return jax.tree.map(whole, self.local(tree, self.gathered_specs(tree)), specs)

    def gather(self, parts: Any, specs: Any) -> Any:
        """On a device: its parts of parameters stored as `specs` → the parameters, whole but for other axes."""

        def whole(part, spec):
            if "fsdp" not in _axes(spec):
                return part
            part = part.astype(self.gathered_dtype(part.dtype))
            return jax.lax.all_gather(part, "fsdp", axis=_dimension(spec, "fsdp"), tiled=True)

        return jax.tree.map(whole, parts, specs)

    def reduce_scatter_grads(self, gradients: Any, specs: Any, prefix: str = "") -> Any:
        """On a device: gradients to used parameters → this device's term [1, …] of those of the stored ones."""

        def term(path, gradient, spec):
            if "fsdp" in _axes(spec):
                gradient = gradient.astype(self.gathered_dtype(gradient.dtype))
                gradient = reduce_scatter(gradient, "fsdp", _dimension(spec, "fsdp"))
            gradient = gradient.astype(jnp.float32)
            parallel = _IN_PARALLEL.search(_name(prefix, path))
            return (gradient if parallel else share(gradient, "tensor"))[None]

        return jax.tree.map_with_path(term, gradients, specs) if self.mesh else gradients

    def sum_partials(self, gradients: Any, prefix: str = "") -> Any:
        """In a program of all devices: gradients [n, …] → their sums over n, in the places of the parameters."""
        return self.constrain(jax.tree.map(lambda summands: summands.sum(0), gradients), prefix)

    def zeros(self, tree: Any, prefix: str = "") -> Any:
        """Zeros to add gradients to, [n, …] on a mesh."""

        def zero(leaf, spec):
            n = math.prod(self._sizes[axis] for axis in _tuple(spec[0])) if spec else 1
            return jax.lax.with_sharding_constraint(jnp.zeros((n, *leaf.shape)), self.sharding(spec))

        if self.mesh is None:
            return jax.tree.map(jnp.zeros_like, tree)
        return jax.tree.map(zero, tree, self.grad_specs(tree, prefix))

    def stack(self, tree: Any) -> Any:
        """On a device: arrays of its own → its parts of arrays [devices, …]."""
        return jax.tree.map(lambda leaf: leaf[None], tree) if self.mesh else tree

    def unstack(self, tree: Any) -> Any:
        """On a device: the way back from `stack`."""
        return jax.tree.map(lambda leaf: leaf[0], tree) if self.mesh else tree

    def _dividing(self, axes: str | tuple[str, ...] | None, size: int) -> tuple[str, ...]:
        """Those of the axes that the mesh has, as far as they divide the size."""
        kept: tuple[str, ...] = ()
        for axis in _tuple(axes):
            if axis in self._axes and size % math.prod(self._sizes[a] for a in (*kept, axis)) == 0:
                kept = (*kept, axis)
        return kept

    def _sharing(self, spec: P) -> tuple[str, ...]:
        """Axes along which devices hold the same part."""
        return tuple(axis for axis in self._axes if axis not in _axes(spec))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _name(prefix: str, path: tuple) -> str:
    """The parameter's name, without the indices of layers and of trees side by side."""
    keys = tuple(key for key in path if not isinstance(key, jax.tree_util.SequenceKey))
    names = jax.tree_util.keystr(keys, simple=True, separator=".")
    return hf_name(".".join(filter(None, (prefix, names))))


def _tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def _axes(spec: P) -> set[str]:
    return {axis for axes in spec for axis in _tuple(axes)}


def _dimension(spec: P, axis: str) -> int:
    return next(i for i, axes in enumerate(spec) if axis in _tuple(axes))


def _without(spec: P, axis: str) -> P:
    return _short(tuple(a for a in _tuple(axes) if a != axis) for axes in spec)


def _short(dimensions: Iterable[tuple[str, ...]]) -> P:
    """The spec as JAX itself writes it: one axis without its tuple, no dimensions at the end that are whole."""
    axes = [names[0] if len(names) == 1 else names or None for names in dimensions]
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


WHOLE = Layout(None)
"""One device."""
