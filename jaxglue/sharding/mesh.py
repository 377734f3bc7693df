"""The device mesh: axis sizes, checks, and placement of batches and parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxglue.models.config import DecoderConfig, MoeConfig
from jaxglue.models.family import find_family
from jaxglue.ops.collectives import BATCH_AXES
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.row_split import CONTEXT
from jaxglue.sharding.specs import axes_tuple, make_spec

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Size of every mesh axis; devices along the last axis are nearest to each other."""

    data: int = 1
    """Replicas of the weights."""
    fsdp: int = 1
    """Shards of every weight; a layer's are gathered when it runs."""
    expert: int = 1
    """Groups of experts, each on its own devices; tokens travel to them."""
    context: int = 1
    """Shards of every row's tokens; attention gathers keys and values."""
    tensor: int = 1
    """Shards of every matrix multiplication."""

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"--mesh {axis}={size}: an axis has at least 1 device")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `data=2,fsdp=4`; omitted axes have one device.

        Raises:
            ValueError: an unknown or repeated axis, or a size that is not an integer.
        """
        names, sizes = [field.name for field in fields(cls)], {}
        for part in text.split(","):
            axis, _, size = (word.strip() for word in part.partition("="))
            if axis not in names or axis in sizes or not size.isdecimal():
                expected = f"auto, or sizes of {', '.join(names)}, such as data=2,fsdp=4"
                raise ValueError(f"--mesh {text!r}: {part.strip()!r} is not understood; expected {expected}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of devices along each axis."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def devices(self) -> int:
        """Return the number of devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Return the number of shards of a batch's rows."""
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @property
    def abstract(self) -> AbstractMesh:
        """Return the mesh without devices, for planning."""
        return AbstractMesh(tuple(self.sizes.values()), tuple(self.sizes), axis_types=_auto(self))

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "data=1"

    def check(self, config: DecoderConfig, *, batch_size: int, devices: int, seq_len: int | None = None) -> None:
        """Raise ValueError, with the remedy, when the mesh does not fit the devices, the batch or the model."""
        if self.devices != devices:
            raise ValueError(
                f"--mesh {self} is for {self.devices} devices, and there are {devices}: the sizes of the axes must "
                "multiply to the number of devices (CUDA_VISIBLE_DEVICES chooses among them)"
            )
        if batch_size % self.batch_shards:
            nearest = -(-batch_size // self.batch_shards) * self.batch_shards
            raise ValueError(
                f"--batch-size {batch_size} does not divide among the {self.batch_shards} parts of --mesh {self}: "
                f"use --batch-size {nearest}"
            )
        moe = config.moe
        if self.expert > 1 and moe is None:
            raise ValueError(f"--mesh {self}: {config.model_type} has no experts; use data or fsdp instead of expert")
        if moe is not None and moe.num_experts % self.expert:
            raise ValueError(f"--mesh {self}: the model's {moe.num_experts} experts do not divide by {self.expert}")
        if self.tensor > 1:
            self._check_tensor(config)
        if self.context > 1:
            self._check_context(config, seq_len)
        if self.expert > 1 and moe is not None:
            self._check_expert(moe, config.hidden_size)

    def _check_expert(self, moe: MoeConfig, hidden_size: int) -> None:
        made, sizes = FORMATS[moe.quantize], (hidden_size, moe.intermediate_size)
        if not made.divides((moe.num_experts, *sizes), self.expert):
            raise ValueError(
                f"--mesh {self}: {moe.num_experts // self.expert} experts of {' × '.join(map(str, sizes))} do not fill "
                f"the groups in which {made.label} stores scales; use fewer devices along expert, or fsdp"
            )

    def _check_context(self, config: DecoderConfig, seq_len: int | None) -> None:
        if seq_len is not None and seq_len % self.context:
            nearest = -(-seq_len // self.context) * self.context
            raise ValueError(
                f"--mesh {self}: rows of {seq_len} tokens do not divide among {self.context} GPUs: use --seq-len "
                f"{nearest}"
            )
        for obstacle in filter(None, (mixer.why_not_split(self.context) for mixer in config.mixer_kinds)):
            raise ValueError(f"--mesh {self}: {obstacle}; use data or fsdp for the rest")

    def _check_tensor(self, config: DecoderConfig) -> None:
        remedy = "use data or fsdp instead of tensor"
        if config.moe is not None:
            raise ValueError(f"--mesh {self}: tensor is for dense models, {config.model_type} has experts; use expert")
        for mixer in config.mixer_kinds:
            if not mixer.splits_heads:
                raise ValueError(f"--mesh {self}: tensor cannot split {mixer.title}; {remedy}")
        if config.quantize != "none":
            raise ValueError(
                f"--mesh {self}: tensor cannot split weights in {FORMATS[config.quantize].label}; {remedy}"
            )
        if config.attention_bias or config.mlp_bias:
            raise ValueError(f"--mesh {self}: tensor cannot split projections with biases; {remedy}")
        parts = find_family(config.model_type).parts
        if parts.fused_qkv or parts.fused_gate_up or parts.head_norms == "full":
            raise ValueError(
                f"--mesh {self}: tensor cannot split fused projections, or norms of whole queries and keys, as "
                f"{config.model_type} has; {remedy}"
            )
        if config.layer_shapes:
            raise ValueError(f"--mesh {self}: tensor cannot split layers of several sizes; {remedy}")
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (size := getattr(config, name)) % self.tensor:
                raise ValueError(f"--mesh {self}: {name}={size} does not divide by {self.tensor}; {remedy}")


def mesh_of(shape: MeshShape) -> Mesh | None:
    """Build the mesh of a shape over all devices; None for one device."""
    return make_mesh(shape) if shape.devices > 1 else None


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh over the given devices, by default all devices of all processes.

    Programs on it either run under `per_device` or are partitioned by XLA.
    """
    sizes = shape.sizes
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=_auto(shape), devices=devices)


def _auto(shape: MeshShape) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * len(shape.sizes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of batch arrays [B, …]."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


_OF_ROWS = frozenset(
    {
        *("cu_seqlens", "units", "order", "places", "stops", "advantages", "mean_weight"),
        *("first_queries", "features"),
    }
)
"""Fields of batches that every device along `context` has whole."""


def batch_specs(batches: Any, axes: Sequence[str]) -> Any:
    """Return the specs of batches' arrays [B, …] and [B, T, …], of which these axes split rows and their tokens."""
    rows = make_spec([tuple(axis for axis in BATCH_AXES if axis in axes)])
    if CONTEXT not in axes:
        return jax.tree.map(lambda _: rows, batches)
    tokens = make_spec([axes_tuple(rows[0]) if rows else (), (CONTEXT,)])

    def fields(path) -> list[str]:
        return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]

    compares = any("answers" in fields(path) for path, _ in jax.tree.leaves_with_path(batches))

    def spec(path, _):
        names = fields(path)
        of_rows = names[-1] in _OF_ROWS or names[-2:] == ["split", "positions"] or "patches" in names
        of_units = (compares and names[-1] == "columns") or ("answers" in names and names[-1] != "owners")
        return rows if of_rows or of_units else tokens

    return jax.tree.map_with_path(spec, batches)


def place_batch(batches: Any, mesh: Mesh | None) -> Any:
    """Copy batches, numpy arrays [B, …] of this process's rows, to their devices; split rows where the mesh does."""
    parts = 1 if mesh is None else mesh.shape.get(CONTEXT, 1)
    if mesh is None or parts == 1:
        return place_rows(batches, mesh)
    batches = jax.tree.map(
        lambda batch: batch.split(parts), batches, is_leaf=lambda part: not isinstance(part, tuple | list)
    )
    _, count = process_batch_shard(mesh, math.prod(mesh.shape[axis] for axis in BATCH_AXES))
    specs = batch_specs(batches, [axis for axis, size in mesh.shape.items() if size > 1])

    def place(array, spec):
        shape = array.shape[0] * count, *array.shape[1:]
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), array, shape)

    return jax.tree.map(place, batches, specs)


def place_rows(rows: Any, mesh: Mesh | None) -> Any:
    """Copy numpy arrays [B, …] of this process's rows to their devices; those along `context` have whole ones."""
    if mesh is None:
        return jax.device_put(rows)
    return jax.tree.map(partial(jax.make_array_from_process_local_data, batch_sharding(mesh)), rows)


def put_on_mesh(tree: Any, shardings: Any) -> Any:
    """Copy arrays that every process holds whole to their shards, without waiting for other processes."""
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]), tree, shardings)


def process_batch_shard(mesh: Mesh | None, batch_size: int) -> tuple[int, int]:
    """Return (index, count) of the equal shard of a batch's rows on this process's devices; processes may share one.

    Raises:
        ValueError: the rows are not contiguous, or not an equal part of the batch.
    """
    if mesh is None:
        return 0, 1
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    rows = sorted({row for part in slices if part for row in range(*part[0].indices(batch_size))})
    count, rest = divmod(batch_size, len(rows))
    if rest or rows != list(range(rows[0], rows[0] + len(rows))) or rows[0] % len(rows):
        raise ValueError(
            f"--mesh: this process's GPUs hold rows {rows} of {batch_size}, expected one contiguous equal part: "
            "use a mesh that keeps them together, such as fsdp alone"
        )
    return rows[0] // len(rows), count
