"""A layer's programs on one device, traced without a device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import PRESETS, RematPolicy
from jaxglue.models.parameters import Params
from jaxglue.planner.resident import tree_bytes
from jaxglue.planner.workload import Workload, abstract_input
from jaxglue.sharding.mesh import MeshShape
from jaxglue.sharding.rules import Layout


class LayerPrograms(NamedTuple):
    """A layer's programs on one device, and the bytes saved in between beside the layer's input."""

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    saved: int
    """On the device."""
    offloaded: int
    """On the host."""


def layer_programs(
    graphdef: nnx.GraphDef, policy: RematPolicy, workload: Workload, trees: Sequence[Params], *, experts: int = 1
) -> LayerPrograms:
    """Trace a layer's forward and backward passes, with its experts spread over some devices.

    Args:
        graphdef: the layer without its parameters.
        policy: of its values for the backward pass.
        workload: gives shapes and dtypes.
        trees: trainable and frozen parameters, abstract.
        experts: devices that share the experts.
    """
    mesh = MeshShape(expert=experts)
    layer = LayerFunctions(graphdef, policy, Layout(mesh.abstract, workload.dtype))
    x, context = abstract_input(replace(workload, batch_size=workload.batch_size * experts))
    forward = layer.forward.trace(*trees, x, context)
    y, residuals, _ = forward.out_info
    backward = layer.backward.trace(residuals, *trees, x, context, y, None)
    kept = (tree_bytes(part) // experts for part in (residuals.saved, residuals.offloaded))
    return LayerPrograms(_local_program(forward.jaxpr), _local_program(backward.jaxpr), *kept)


def replay_program(
    graphdef: nnx.GraphDef, workload: Workload, trees: Sequence[Params], *, from_attention: bool
) -> ClosedJaxpr:
    """Trace a layer's second run (`LayerFunctions.replay`) on one device, with attention's output given or not."""
    config = workload.config
    shape = workload.batch_size, workload.seq_len, config.num_attention_heads, config.head_dim
    attention_out = jax.ShapeDtypeStruct(shape, workload.dtype) if from_attention else None
    layer = LayerFunctions(graphdef, PRESETS["full"])
    return layer.replay.trace(attention_out, *trees, *abstract_input(workload)).jaxpr


def reference_program(graphdef: nnx.GraphDef, workload: Workload, frozen: Params) -> ClosedJaxpr:
    """Trace the forward pass of a layer of the reference (`without_adapters`) on one device."""
    layer = LayerFunctions(graphdef, PRESETS["full"])
    return layer.apply.trace({}, frozen, *abstract_input(workload)).jaxpr


def _local_program(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the body of the program's `shard_map`; without one, the program itself."""
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            inner: Jaxpr = eqn.params["jaxpr"]
            return ClosedJaxpr(inner, ())
    return program
