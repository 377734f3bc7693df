"""Mixture of experts: routing by one sort, and grouped matmuls over what it orders."""

from jaxglue.moe.backends import BACKENDS, choose_backend
from jaxglue.moe.fused import Adapter
from jaxglue.moe.grouped import grouped_matmul
from jaxglue.moe.groups import Groups
from jaxglue.moe.losses import auxiliary_loss, routing_statistics, z_loss
from jaxglue.moe.mlp import ExpertLora, moe_mlp
from jaxglue.moe.routing import Routing, route, routing_of

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
