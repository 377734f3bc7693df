"""A layer's programs on one device, traced without a device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import RematPolicy
from jaxglue.models.parameters import Params
from jaxglue.planner.workload import Workload, abstract_input
from jaxglue.sharding.layout import Layout
from jaxglue.sharding.mesh import MeshShape


class LayerPrograms(NamedTuple):
    """What a device runs for a layer, and the bytes that it keeps in between beside the layer's input."""

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    saved: int
    """On the device."""
    offloaded: int
    """On the host."""


def layer_programs(
    graph: Any, policy: RematPolicy, workload: Workload, trees: Sequence[Params], *, experts: int = 1
) -> LayerPrograms:
    """The programs of a layer with these trainable and frozen parameters, with its experts on so many devices."""
    mesh = MeshShape(expert=experts)
    layer = LayerFunctions(graph, policy, Layout(mesh.abstract, workload.dtype))
    x, context = abstract_input(replace(workload, batch_size=workload.batch_size * experts))
    forward, (y, residuals, _) = jax.make_jaxpr(layer._forward, return_shape=True)(*trees, x, context)
    backward = jax.make_jaxpr(layer._backward)(residuals, *trees, x, context, y, None)
    kept = (sum(a.size * a.dtype.itemsize for a in part) // experts for part in (residuals.saved, residuals.offloaded))
    return LayerPrograms(_of_a_device(forward), _of_a_device(backward), *kept)


def _of_a_device(program: ClosedJaxpr) -> ClosedJaxpr:
    """The inside of a program of all devices; a program of one device itself."""
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            inner: Jaxpr = eqn.params["jaxpr"]
            return ClosedJaxpr(inner, ())
    return program
