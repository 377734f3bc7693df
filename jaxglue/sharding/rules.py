"""Partition rules: which mesh axes split each parameter, and the specs, shardings and local shapes that follow."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import hf_name
from jaxglue.ops.collectives import BATCH_AXES
from jaxglue.ops.row_split import CONTEXT
from jaxglue.sharding.mesh import batch_specs, put_on_mesh
from jaxglue.sharding.specs import Axes, axes_tuple, make_spec, spec_axes, without_axis

_SERVED = "matrix|scale|minimum|scale_levels|minimum_levels|top|seeds"
_ARRAY = rf"((\.stored)?\.(codes|values|scales|absmax|divisors|{_SERVED}))?"
"""An array of a quantized matrix with a row for each of its rows."""
RULES: tuple[tuple[str, P], ...] = (
    # parameter                                                     axes that split each of its dimensions
    (r"^model\.(visual|(embed_)?(vision|audio)|multi_modal)",       P()),  # towers
    (r"\.experts\.\w+_proj(_bias|\.lora_A|\.lora_B)$",              P("expert")),
    (r"\.experts\.\w+_proj(_[a-z]+)?$",                             P("expert", "fsdp")),  # [E, ·, ·], also parts
    (rf"\.experts\.\w+_proj(\.weight)?\.rows{_ARRAY}$",             P(("expert", "fsdp"))),  # [E·out, ·]
    (r"\.experts\.\w+_proj(\.weight)?\.rows\.scale_absmax$",        P("expert")),
    (rf"(embed_tokens|lm_head)\.weight{_ARRAY}$",                   P("fsdp")),  # [V, D]
    (rf"\.(q|k|v|gate|up)_proj\.weight{_ARRAY}$",                   P(("tensor", "fsdp"))),  # [out, in]
    (rf"\.(qkv|gate_up)_proj\.weight{_ARRAY}$",                     P("fsdp")),
    (rf"\.(o|down)_proj\.weight{_ARRAY}$",                          P("fsdp", "tensor")),
    (rf"\.((q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)\.weight{_ARRAY}$", P("fsdp")),
    (rf"\.(in_proj(_qkv|_z)?|out_proj|g_proj)\.weight{_ARRAY}$",           P("fsdp")),
    (rf"\.(input|output)_linear\.weight{_ARRAY}$",                  P("fsdp")),
    (rf"\.w[123]\.weight{_ARRAY}$",                                P("fsdp")),
    (r"\.(q|k|v|gate|up)_proj\.(bias|lora_B)$|\.sinks$",            P("tensor")),
    (r"\.(o|down)_proj\.lora_A$",                                   P(None, "tensor")),
    (r"",                                                           P()),
)  # fmt: skip
"""Pattern in a parameter's name → axes; the first match decides. Gradients and optimizer states are split alike."""

_TENSOR_PARALLEL = re.compile(r"(^|\.)(self_attn|mlp)\.")
_REPLICATED_CONTEXT = ("dropout_key", "router_losses")


class Layout:
    """Specs of a model's arrays on one mesh; without a mesh (None) nothing is split.

    Args:
        mesh: with the axes of `MeshShape`.
        dtype: of gathered weights; trained float32 parameters are gathered in it too.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None, dtype=jnp.float32):
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        self._sizes = dict(self.mesh.shape) if self.mesh else {}
        self._axes = tuple(axis for axis, size in self._sizes.items() if size > 1)
        self.dtype = jnp.dtype(dtype)
        rows, tokens = (tuple(axis for axis in axes if axis in self._axes) for axes in (BATCH_AXES, (CONTEXT,)))
        self.batch_spec = make_spec([rows, tokens])
        """Spec of arrays [B, T, …]."""
        self.row_spec = make_spec([rows])
        """Spec of arrays [B, …] of rows' values."""
        self.batch_shards = math.prod(self._sizes[axis] for axis in rows)
        """Devices that have rows of their own."""
        self.device_spec = make_spec([self._axes])
        """Spec of arrays [devices, …], one row for each device."""

    def size(self, axis: str) -> int:
        """Return the number of devices along an axis."""
        return self._sizes.get(axis, 1)

    @property
    def gathers(self) -> bool:
        """Return whether weights are stored split and gathered for use (FSDP)."""
        return "fsdp" in self._axes

    def sharding(self, spec: P) -> NamedSharding | None:
        """Return a spec's sharding on this mesh; None without one."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """Return the shardings of a tree of specs on this mesh; None without one."""
        return None if self.mesh is None else jax.tree.map(partial(NamedSharding, self.mesh), specs)

    def rule(self, name: str) -> P:
        """Return the entry of `RULES` for a parameter's name."""
        return next(spec for pattern, spec in RULES if re.search(pattern, name))

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        """Return the spec of one parameter. An axis that does not divide a dimension leaves it whole."""
        dimensions = zip(self.rule(name), shape, strict=False)
        return make_spec(self._dividing_axes(axes, size) for axes, size in dimensions)

    def param_specs(self, tree: Any, prefix: str = "") -> Any:
        """Return the spec of every stored parameter of a tree, and of its optimizer state, by name and shape."""
        if not self._axes:
            return jax.tree.map(lambda _: P(), tree)
        return jax.tree.map_with_path(lambda path, leaf: self.spec(param_name(prefix, path), leaf.shape), tree)

    def gathered_specs(self, tree: Any) -> Any:
        """Return the specs of the parameters after gathering over `fsdp`."""
        return jax.tree.map(lambda spec: without_axis(spec, "fsdp"), self.param_specs(tree))

    def grad_specs(self, tree: Any, prefix: str = "") -> Any:
        """Return the specs of partial gradients [n, …], one row for each of the n devices that share a shard."""

        def partials(spec):
            return make_spec([self.replicating_axes(spec), *map(axes_tuple, spec)])

        return jax.tree.map(partials, self.param_specs(tree, prefix))

    def batch_specs(self, batch: Any) -> Any:
        """Return the specs of a batch's arrays."""
        return batch_specs(batch, self._axes)

    def context_specs(self, context: PackedContext) -> Any:
        """Return the specs of a layer's context: split as the batch is, keys and coefficients replicated."""

        def spec(path, whole):
            return P() if path[0].name in _REPLICATED_CONTEXT else whole

        return jax.tree.map_with_path(spec, self.batch_specs(context))

    def place(self, name: str, value: Any) -> Any:
        """Return the sharding of a named parameter, or of each array of its value; None without a mesh."""
        return self.shardings(self.param_specs(value, name))

    def put(self, tree: Any) -> Any:
        """Copy parameters to their shards on the mesh."""
        return put_on_mesh(tree, self.shardings(self.param_specs(tree))) if self.mesh else tree

    def axes(self, spec: P) -> list[str]:
        """Return the axes of a spec in the mesh's order."""
        return [axis for axis in self._sizes if axis in spec_axes(spec)]

    def copies(self, spec: P) -> int:
        """Return the number of devices that hold the same shard."""
        return math.prod(self._sizes[axis] for axis in self.replicating_axes(spec))

    def shards(self, axes: Axes) -> int:
        """Return the number of shards of a dimension split by these axes."""
        return math.prod(self._sizes[axis] for axis in axes_tuple(axes))

    def gathered_dtype(self, path: tuple, dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype in which an array of a tree is gathered: its own if part of a quantized parameter."""
        is_part = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey)
        return jnp.dtype(dtype) if is_part or not jnp.issubdtype(dtype, jnp.floating) else self.dtype

    def local_shapes(self, tree: Any, specs: Any) -> Any:
        """Return shapes and dtypes of one device's shards."""

        def shard(leaf, spec):
            counts = [*map(self.shards, spec), *[1] * (leaf.ndim - len(spec))]
            return jax.ShapeDtypeStruct([n // count for n, count in zip(leaf.shape, counts, strict=True)], leaf.dtype)

        return jax.tree.map(shard, tree, specs)

    def gathered_shapes(self, tree: Any) -> Any:
        """Return shapes and dtypes of the parameters that one device gathers, None for the others."""
        if not self.gathers:
            return jax.tree.map(lambda _: None, tree)

        def gathered(path, leaf, spec):
            if "fsdp" not in spec_axes(spec):
                return None
            return jax.ShapeDtypeStruct(leaf.shape, self.gathered_dtype(path, leaf.dtype))

        return jax.tree.map_with_path(
            gathered, self.local_shapes(tree, self.gathered_specs(tree)), self.param_specs(tree)
        )

    def _dividing_axes(self, axes: Axes, size: int) -> tuple[str, ...]:
        """Keep axes of this mesh in order as long as their product divides the size."""
        kept: tuple[str, ...] = ()
        for axis in axes_tuple(axes):
            if axis in self._axes and size % self.shards((*kept, axis)) == 0:
                kept = (*kept, axis)
        return kept

    def replicating_axes(self, spec: P) -> tuple[str, ...]:
        """Return the axes along which devices hold the same shard."""
        return tuple(axis for axis in self._axes if axis not in spec_axes(spec))


def param_name(prefix: str, path: tuple) -> str:
    """Return the Hugging Face name of a parameter at a tree path, without list indices."""
    keys = tuple(key for key in path if not isinstance(key, jax.tree_util.SequenceKey))
    names = jax.tree_util.keystr(keys, simple=True, separator=".")
    return hf_name(".".join(filter(None, (prefix, names))))


def is_tensor_parallel(name: str) -> bool:
    """Return whether devices along `tensor` compute different parts of this parameter's module."""
    return _TENSOR_PARALLEL.search(name) is not None


SINGLE_DEVICE = Layout(None)
"""No mesh."""
