"""The mesh: how the GPUs of a run share its work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxglue.models.config import DecoderConfig
from jaxglue.ops.collectives import BATCH_AXES

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Size of every axis of a mesh, the one whose devices are the nearest to each other last."""

    data: int = 1
    """Copies of the weights."""
    fsdp: int = 1
    """Parts of every weight; a layer's are gathered when it runs."""
    expert: int = 1
    """Parts of the experts, each on its own devices; tokens travel to them."""
    tensor: int = 1
    """Parts of every matrix multiplication."""

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"--mesh {axis}={size}: an axis has at least 1 device")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `data=2,fsdp=4`; axes that are left out have one device.

        Raises:
            ValueError: no such axis, an axis named twice, or no whole number.
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
        """Axis → devices along it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def rows(self) -> int:
        """Parts into which the rows of a batch are split."""
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh without its devices, for plans."""
        return AbstractMesh(tuple(self.sizes.values()), tuple(self.sizes), axis_types=_auto(self))

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "data=1"

    def check(self, config: DecoderConfig, *, batch_size: int, devices: int) -> None:
        """Raises ValueError when the mesh does not fit the devices, the batch or the model, with the remedy."""
        if self.devices != devices:
            raise ValueError(
                f"--mesh {self} is for {self.devices} devices, and there are {devices}: the sizes of the axes must "
                "multiply to the number of devices (CUDA_VISIBLE_DEVICES chooses among them)"
            )
        if batch_size % self.rows:
            nearest = -(-batch_size // self.rows) * self.rows
            raise ValueError(
                f"--batch-size {batch_size} does not divide among the {self.rows} parts of --mesh {self}: "
                f"use --batch-size {nearest}"
            )
        moe = config.moe
        if self.expert > 1 and moe is None:
            raise ValueError(f"--mesh {self}: {config.model_type} has no experts; use data or fsdp instead of expert")
        if moe is not None and moe.num_experts % self.expert:
            raise ValueError(f"--mesh {self}: the model's {moe.num_experts} experts do not divide by {self.expert}")
        if self.tensor > 1:
            self._check_tensor(config)

    def _check_tensor(self, config: DecoderConfig) -> None:
        remedy = "use data or fsdp instead of tensor"
        if config.moe is not None:
            raise ValueError(f"--mesh {self}: tensor is for dense models, {config.model_type} has experts; use expert")
        if config.quantize != "none":
            raise ValueError(f"--mesh {self}: tensor cannot split --quantize {config.quantize} weights; {remedy}")
        if config.attention_bias or config.mlp_bias:
            raise ValueError(f"--mesh {self}: tensor cannot split projections with biases; {remedy}")
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (size := getattr(config, name)) % self.tensor:
                raise ValueError(f"--mesh {self}: {name}={size} does not divide by {self.tensor}; {remedy}")


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of this shape over all devices of all processes, unless others are given.

    What runs on it either says so (`per_device`) or is left to XLA.
    """
    sizes = shape.sizes
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=_auto(shape), devices=devices)


def _auto(shape: MeshShape) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * len(shape.sizes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where the rows of arrays [B, …] of a batch belong."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def place_batch(batches: Any, mesh: Mesh | None) -> Any:
    """Batches of numpy arrays [B, …], each process's own rows of them, on their devices."""
    if mesh is None:
        return jax.device_put(batches)
    return jax.tree.map(partial(jax.make_array_from_process_local_data, batch_sharding(mesh)), batches)


def put_whole(tree: Any, shardings: Any) -> Any:
    """Arrays that every process has whole, in their places: no process waits for another, as `jax.device_put` would."""
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]), tree, shardings)


def own_rows(mesh: Mesh | None, batch_size: int) -> tuple[int, int]:
    """(which, of how many) equal parts of a batch's rows this process's devices work on; processes may share one.

    Raises:
        ValueError: its rows are no such part, as where a process has devices of several hosts' rows.
    """
    if mesh is None:
        return 0, 1
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    rows = sorted({row for part in slices if part for row in range(*part[0].indices(batch_size))})
    count, rest = divmod(batch_size, len(rows))
    if rest or rows != list(range(rows[0], rows[0] + len(rows))) or rows[0] % len(rows):
        raise ValueError(f"the rows {rows} of {batch_size} are no part that one process can read: use another --mesh")
    return rows[0] // len(rows), count


def replicated(mesh: Mesh) -> NamedSharding:
    """All of an array on every device."""
    return NamedSharding(mesh, PartitionSpec())
