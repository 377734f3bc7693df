"""Mixture of experts: routing by one sort, and grouped matmuls over what it orders."""

from jaxglue.ops.moe.backends import BACKENDS, choose_backend
from jaxglue.ops.moe.fused import Adapter
from jaxglue.ops.moe.grouped import grouped_matmul
from jaxglue.ops.moe.groups import Groups
from jaxglue.ops.moe.losses import auxiliary_loss, routing_statistics, z_loss
from jaxglue.ops.moe.mlp import ExpertLora, moe_mlp
from jaxglue.ops.moe.routing import Routing, route, routing_of

__all__ = [
    "BACKENDS",
    "Adapter",
    "ExpertLora",
    "Groups",
    "Routing",
    "auxiliary_loss",
    "choose_backend",
    "grouped_matmul",
    "moe_mlp",
    "route",
    "routing_of",
    "routing_statistics",
    "z_loss",
]
