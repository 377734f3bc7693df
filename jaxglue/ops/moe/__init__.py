"""Mixture of experts: routing by one sort, and grouped matmuls over what it orders."""

from jaxglue.ops.moe.backends import BACKENDS, choose_backend
from jaxglue.ops.moe.fused import Adapter
from jaxglue.ops.moe.grouped import grouped_matmul
from jaxglue.ops.moe.groups import GroupMetadata
from jaxglue.ops.moe.losses import auxiliary_loss, routing_statistics, z_loss
from jaxglue.ops.moe.mlp import ExpertLora, moe_mlp
from jaxglue.ops.moe.routing import Routing, make_routing, route

__all__ = [
    "BACKENDS",
    "Adapter",
    "ExpertLora",
    "GroupMetadata",
    "Routing",
    "auxiliary_loss",
    "choose_backend",
    "grouped_matmul",
    "make_routing",
    "moe_mlp",
    "route",
    "routing_statistics",
    "z_loss",
]
