"""Bytes of parameters, gradients and optimizer state on one GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from jaxglue.engine.residency import DEVICE, MAPPED
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.sharding.rules import Layout


@dataclass(frozen=True, kw_only=True)
class ResidentBytes:
    """Bytes on one GPU that no remat policy changes."""

    trainable_layers: tuple[int, ...]
    """Float32 parameters of each layer that train."""
    trainable_ends: tuple[int, ...]
    """Float32 parameters of the embedding, the last norm and the head that train."""
    trainable_table: int
    """Float32 parameters of the embedding that train."""
    frozen_layers: tuple[int, ...]
    """Frozen parameters of each layer."""
    frozen_ends: int
    """Other frozen parameters, without those in host memory."""
    host_table: int
    """An embedding table in host memory."""
    host_head: int
    """An output projection in host memory, which is copied to the GPU for the head."""
    moments: int
    """AdamW's two moments."""
    gradients: int
    """Float32 gradients held at once."""

    @property
    def trainable(self) -> int:
        """Return the bytes of all parameters that train."""
        return sum(self.trainable_layers) + sum(self.trainable_ends)

    @property
    def host_ends(self) -> int:
        """Return the bytes of embedding table and output projection in host memory."""
        return self.host_table + self.host_head

    def streamed_layers(self, weights: Sequence[str]) -> list[int]:
        """Return the bytes of each layer's frozen parameters that are streamed, by their places."""
        return [0 if place == DEVICE else size for place, size in zip(weights, self.frozen_layers, strict=True)]

    def mapped_layers(self, weights: Sequence[str]) -> list[int]:
        """Return the bytes of each layer's frozen parameters that are streamed from files."""
        return [size if place == MAPPED else 0 for place, size in zip(weights, self.frozen_layers, strict=True)]

    def frozen(self, weights: Sequence[str] | None = None) -> int:
        """Return the bytes of frozen parameters on the GPU: all of them, or by the layers' places."""
        return self.frozen_ends + sum(self.frozen_layers) - (sum(self.streamed_layers(weights)) if weights else 0)

    def total(self, weights: Sequence[str] | None = None) -> int:
        """Return the bytes of parameters, gradients and optimizer state."""
        return self.trainable + self.frozen(weights) + self.moments + self.gradients


def resident_bytes(workload: Workload) -> ResidentBytes:
    """Count a workload's resident bytes from the shapes and dtypes of one GPU's parts."""
    return _resident_bytes(workload.any_rows)


@lru_cache(maxsize=8)
def _resident_bytes(workload: Workload) -> ResidentBytes:
    layout = Layout(workload.mesh.abstract, workload.dtype)
    trainable, frozen = (layout.local_shapes(tree, layout.param_specs(tree)) for tree in abstract_parts(workload)[1:])
    layers = tuple(tree_bytes(layer) for layer in trainable["layers"])
    ends = tuple(tree_bytes(part) for name, part in trainable.items() if name != "layers")
    trained = sum(layers) + sum(ends)
    one_at_a_time = workload.update_in_backward and workload.gradient_accumulation_steps == 1
    on_host = {"embed_tokens", "lm_head"} if workload.host_embeddings else set()
    host = {name: tree_bytes(frozen[name]) for name in on_host}
    return ResidentBytes(
        trainable_layers=layers,
        trainable_ends=ends,
        trainable_table=tree_bytes(trainable.get("embed_tokens", {})),
        frozen_layers=tuple(tree_bytes(layer) for layer in frozen["layers"]),
        frozen_ends=sum(tree_bytes(part) for name, part in frozen.items() if name not in on_host | {"layers"}),
        host_table=host.get("embed_tokens", 0),
        host_head=host.get("lm_head", 0),
        moments=round(workload.moment_bytes / 4 * trained),
        gradients=max(*layers, *ends) if one_at_a_time else trained,
    )


def tree_bytes(tree: Any) -> int:
    """Sum the bytes of a tree's arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
